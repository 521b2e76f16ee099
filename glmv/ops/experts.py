"""The routed experts: every token through its K experts, weighted and summed.

    permute      tokens to expert order, each as often as it has experts
    expert_mlp   rows in expert order through their experts: "looped" runs in any dtype, "grouped" is one kernel for all
    combine      the weighted sum of a token's K results

Each is an operator with implementations of its own. Expert parallelism exchanges rows before and after `expert_mlp`.
"""
# Shapes: T tokens, H hidden, K experts per token, E experts, I intermediate, F = 2I (gate half first), R = T * K rows,
# N some of them.

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from glmv.ops.grouped_matmul import grouped_matmul, why_unsupported
from glmv.ops.kernels import Kernels
from glmv.ops.permute import count_tokens, expert_order, to_experts
from glmv.ops.precision import at_least_fp32
from glmv.ops.registry import Operator, say_once
from glmv.ops.swiglu import swiglu


class Order(NamedTuple):
    """How rows in expert order stand to (token, k) slots.

    Attributes:
        inverse_R: the row in which each slot stands, integers.
        order_R: the slot that each row comes from; None from a kernel that doesn't tell it.
    """

    inverse_R: Tensor
    order_R: Tensor | None = None


class Permuted(NamedTuple):
    """Rows in expert order, how many each expert has (int64), and the way back."""

    rows_RH: Tensor
    counts_E: Tensor
    order: Order


permute: Operator[..., Permuted] = Operator("permute")
expert_mlp: Operator[..., Tensor] = Operator("expert_mlp")
combine: Operator[..., Tensor] = Operator("combine")


def experts(
    hidden_TH: Tensor,
    top_k_index_TK: Tensor,
    top_k_weight_TK: Tensor,
    gate_up_EHF: Tensor,
    down_EIH: Tensor,
    kernels: Kernels,
    mlp: Callable[..., Tensor] = expert_mlp,
) -> Tensor:
    """All three in a row -> [T, H] in the dtype of `hidden_TH`, which is the weights'.

    Args:
        mlp: what stands in for `expert_mlp`; under expert parallelism it exchanges rows around it.
    """
    rows_RH, counts_E, order = permute(hidden_TH, top_k_index_TK, len(gate_up_EHF), kernels=kernels)
    outputs_RH = mlp(rows_RH, counts_E, gate_up_EHF, down_EIH, kernels=kernels)
    return combine(outputs_RH, top_k_weight_TK, order, kernels=kernels)


@permute.register("torch", when=lambda *args, kernels: True)
def sort_tokens(hidden_TH: Tensor, top_k_index_TK: Tensor, num_experts: int, *, kernels: Kernels) -> Permuted:
    """Rows of one expert stay in token order."""
    order_R, inverse_R = expert_order(top_k_index_TK)
    rows_RH = to_experts(hidden_TH, order_R, inverse_R, top_k_index_TK.shape[1])
    return Permuted(rows_RH, count_tokens(top_k_index_TK, num_experts), Order(inverse_R, order_R))


# Rows of fp32 that the backward of `combine` holds: few enough for a CPU's cache, many enough to fill an accelerator.
ROWS_IN_CACHE, ROWS_AT_ONCE = 512, 16384


class Context(FunctionCtx):
    """What forward leaves for backward."""

    saved_tensors: tuple[Tensor, ...]


class _Combine(torch.autograd.Function):
    """Gathers one slot of all tokens at a time: no copy in token order is made, in fp32 or not."""

    @staticmethod
    def forward(ctx: Context, rows_RH: Tensor, weight_TK: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RH, weight_TK, order_R, inverse_R)
        total_TH = weight_TK.new_zeros(weight_TK.shape[0], rows_RH.shape[1])
        for inverse_T, weight_T in zip(inverse_R.view_as(weight_TK).unbind(1), weight_TK.unbind(1), strict=True):
            slot_TH = rows_RH.index_select(0, inverse_T)
            total_TH.addcmul_(slot_TH.to(total_TH.dtype), weight_T[:, None])
        return total_TH.to(rows_RH.dtype)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows_RH, weight_TK, order_R, inverse_R = ctx.saved_tensors
        grad_TH = grads[0].to(weight_TK.dtype)
        token_R, weight_R = order_R // weight_TK.shape[1], weight_TK.flatten()[order_R]
        grad_RH, grad_R = torch.empty_like(rows_RH), torch.empty_like(weight_R)
        at_once = ROWS_IN_CACHE if rows_RH.device.type == "cpu" else ROWS_AT_ONCE
        for first in range(0, len(order_R), at_once):
            block = slice(first, first + at_once)
            incoming_NH = grad_TH.index_select(0, token_R[block])
            grad_R[block] = (incoming_NH * rows_RH[block]).sum(1)
            grad_RH[block] = incoming_NH.mul_(weight_R[block, None])
        return grad_RH, grad_R[inverse_R].view_as(weight_TK), None, None


@combine.register("torch", when=lambda *args, kernels: True)
def weighted_sum(rows_RH: Tensor, top_k_weight_TK: Tensor, order: Order, *, kernels: Kernels) -> Tensor:
    """Weighted sum over a token's K rows, accumulated in fp32 in the order of K, rounded once -> [T, H].

    Args:
        rows_RH: what the experts returned, in expert order.   top_k_weight_TK: routing weights, fp32 or wider.
    """
    assert order.order_R is not None, "rows that `sort_tokens` sorted"
    weight_TK = top_k_weight_TK.to(at_least_fp32(rows_RH.dtype))
    return _Combine.apply(rows_RH, weight_TK, order.order_R, order.inverse_R)


@expert_mlp.register("looped", when=lambda *tensors, kernels: True)
def looped_mlp(rows_RH: Tensor, counts_E: Tensor, gate_up_EHF: Tensor, down_EIH: Tensor, *, kernels: Kernels) -> Tensor:
    """One matmul an expert. An expert without tokens multiplies 0 rows, so its gradient is zeros, not None."""
    rows = rows_RH.split(counts_E.tolist())
    # unbind, not weight[e]: the backward of each indexing allocates a gradient of all experts.
    outputs = [
        swiglu(*(rows_NH @ gate_up_HF).chunk(2, dim=-1)) @ down_IH
        for rows_NH, gate_up_HF, down_IH in zip(rows, gate_up_EHF.unbind(0), down_EIH.unbind(0), strict=True)
    ]
    return torch.cat(outputs)


def can_group(rows_RH: Tensor, counts_E: Tensor, gate_up_EHF: Tensor, down_EIH: Tensor, *, kernels: Kernels) -> bool:
    """Whether grouped matmul was asked for and can run here; if it cannot, say why, once."""
    if not kernels.grouped:
        return False
    why = why_unsupported(gate_up_EHF) or why_unsupported(down_EIH)
    if rows_RH.device.type == "npu":
        why = why or "PyTorch's grouped kernel does not exist on an NPU, and its own was turned off or refused"
    if why:
        say_once(f"use_grouped_expert_matmul: {why}; the experts run looped (same result, slower)")
    return why is None


@expert_mlp.register("grouped", when=can_group)
def grouped_mlp(
    rows_RH: Tensor, counts_E: Tensor, gate_up_EHF: Tensor, down_EIH: Tensor, *, kernels: Kernels
) -> Tensor:
    """Two grouped matmuls; no host synchronisation."""
    gate_RI, up_RI = grouped_matmul(rows_RH, gate_up_EHF, counts_E).chunk(2, dim=-1)
    return grouped_matmul(swiglu(gate_RI, up_RI), down_EIH, counts_E)

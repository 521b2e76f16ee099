"""The routed experts: every token through its K experts, weighted and summed.

`experts(hidden_TH, top_k_index_TK, top_k_weight_TK, gate_up_EHF, down_EIH, grouped=...)` -> [T, H].
"looped" runs in any dtype; "grouped" is one kernel for all experts.
"""
# Shapes: T tokens, H hidden, K experts per token, E experts, I intermediate, F = 2I (gate half first), R = T * K rows,
# N some of them.

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from glmv.ops.grouped_matmul import grouped_matmul, why_unsupported
from glmv.ops.permute import count_tokens, expert_order, to_experts
from glmv.ops.precision import at_least_fp32
from glmv.ops.registry import Operator, say_once
from glmv.ops.swiglu import swiglu

experts: Operator[..., Tensor] = Operator("experts")
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


def combine(rows_RH: Tensor, top_k_weight_TK: Tensor, order: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Weighted sum over a token's K outputs, accumulated in fp32 in the order of K, rounded once -> [T, H].

    Args:
        rows_RH: what the experts returned: row t * K + k for token t's k-th expert, or rows in expert order.
        top_k_weight_TK: routing weights.
        order: from `expert_order`, for rows in expert order.
    """
    if order is None:
        place_R = torch.arange(len(rows_RH), device=rows_RH.device)
        order = place_R, place_R
    return _Combine.apply(rows_RH, top_k_weight_TK.to(at_least_fp32(rows_RH.dtype)), *order)


@experts.register("looped", when=lambda *tensors, grouped: True)
def looped_experts(
    hidden_TH: Tensor,
    top_k_index_TK: Tensor,
    top_k_weight_TK: Tensor,
    gate_up_EHF: Tensor,
    down_EIH: Tensor,
    *,
    grouped: bool = False,
) -> Tensor:
    """One matmul an expert. An expert without tokens multiplies 0 rows, so its gradient is zeros, not None."""
    order_R, inverse_R = expert_order(top_k_index_TK)
    counts = count_tokens(top_k_index_TK, gate_up_EHF.shape[0]).tolist()
    rows = to_experts(hidden_TH, order_R, inverse_R, top_k_index_TK.shape[1]).split(counts)
    # unbind, not weight[e]: the backward of each indexing allocates a gradient of all experts.
    outputs = [
        swiglu(*(rows_NH @ gate_up_HF).chunk(2, dim=-1)) @ down_IH
        for rows_NH, gate_up_HF, down_IH in zip(rows, gate_up_EHF.unbind(0), down_EIH.unbind(0), strict=True)
    ]
    return combine(torch.cat(outputs), top_k_weight_TK, (order_R, inverse_R))


def can_group(
    hidden_TH: Tensor,
    top_k_index_TK: Tensor,
    top_k_weight_TK: Tensor,
    gate_up_EHF: Tensor,
    down_EIH: Tensor,
    *,
    grouped: bool,
) -> bool:
    """Whether grouped matmul was asked for and can run here; if it cannot, say why, once."""
    if not grouped:
        return False
    why = why_unsupported(gate_up_EHF) or why_unsupported(down_EIH)
    if why:
        say_once(f"use_grouped_expert_matmul: {why}; the experts run looped (same result, slower)")
    return why is None


@experts.register("grouped", when=can_group)
def grouped_experts(
    hidden_TH: Tensor,
    top_k_index_TK: Tensor,
    top_k_weight_TK: Tensor,
    gate_up_EHF: Tensor,
    down_EIH: Tensor,
    *,
    grouped: bool = True,
) -> Tensor:
    """Two grouped matmuls over the tokens in expert order; no host synchronisation."""
    order_R, inverse_R = expert_order(top_k_index_TK)
    counts_E = count_tokens(top_k_index_TK, gate_up_EHF.shape[0])
    rows_RH = to_experts(hidden_TH, order_R, inverse_R, top_k_index_TK.shape[1])
    gate_RI, up_RI = grouped_matmul(rows_RH, gate_up_EHF, counts_E).chunk(2, dim=-1)
    outputs_RH = grouped_matmul(swiglu(gate_RI, up_RI), down_EIH, counts_E)
    return combine(outputs_RH, top_k_weight_TK, (order_R, inverse_R))

"""The routed experts: every token through its K experts, weighted and summed.

`experts(hidden_TH, top_k_index_TK, top_k_weight_TK, gate_up_EHF, down_EIH, grouped=...)` -> [T, H].
"looped" runs in any dtype; "grouped" is one kernel for all experts.
"""
# Shapes: T tokens, H hidden, K experts per token, E experts, I intermediate, F = 2I (gate half first), R = T * K rows.

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from glmv.ops.grouped_matmul import grouped_matmul, why_unsupported
from glmv.ops.permute import count_tokens, expert_order, from_experts, to_experts
from glmv.ops.precision import at_least_fp32
from glmv.ops.registry import Operator, say_once
from glmv.ops.swiglu import swiglu

experts: Operator[..., Tensor] = Operator("experts")


class Context(FunctionCtx):
    """What forward leaves for backward."""

    saved_tensors: tuple[Tensor, ...]


class _Combine(torch.autograd.Function):
    """One slot after the other, so that no [T, K, H] in fp32 is made, nor kept for backward."""

    @staticmethod
    def forward(ctx: Context, slots_TKH: Tensor, weight_TK: Tensor) -> Tensor:
        ctx.save_for_backward(slots_TKH, weight_TK)
        total_TH = weight_TK.new_zeros(slots_TKH.shape[0], slots_TKH.shape[2])
        for slot_TH, weight_T in zip(slots_TKH.unbind(1), weight_TK.unbind(1), strict=True):
            total_TH.addcmul_(slot_TH.to(total_TH.dtype), weight_T[:, None])
        return total_TH.to(slots_TKH.dtype)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, Tensor]:
        slots_TKH, weight_TK = ctx.saved_tensors
        grad_TH = grads[0].to(weight_TK.dtype)
        grad_TKH, grad_TK = torch.empty_like(slots_TKH), torch.empty_like(weight_TK)
        for k in range(weight_TK.shape[1]):
            grad_TKH[:, k] = grad_TH * weight_TK[:, k, None]
            grad_TK[:, k] = (grad_TH * slots_TKH[:, k]).sum(1)
        return grad_TKH, grad_TK


def combine(slots_RH: Tensor, top_k_weight_TK: Tensor) -> Tensor:
    """Weighted sum over a token's K outputs, accumulated in fp32 in the order of K, rounded once -> [T, H]."""
    slots_TKH = slots_RH.view(*top_k_weight_TK.shape, slots_RH.shape[1])
    return _Combine.apply(slots_TKH, top_k_weight_TK.to(at_least_fp32(slots_RH.dtype)))


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
    return combine(from_experts(torch.cat(outputs), order_R, inverse_R), top_k_weight_TK)


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
    return combine(from_experts(outputs_RH, order_R, inverse_R), top_k_weight_TK)

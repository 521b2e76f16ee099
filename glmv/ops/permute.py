"""Tokens to expert order, without atomics in either direction (`glmv.ops.experts.combine` is the way back)."""
# Shapes: T tokens, K experts per token, H hidden, R = T * K rows in expert order.

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from glmv.ops.precision import at_least_fp32


def count_tokens(top_k_index_TK: Tensor, num_experts: int) -> Tensor:
    """Rows of each expert [E] int64, without asking an accelerator for a value.

    (`bincount` asks twice, for the smallest and the largest; `histc` has no integer kernel on the CPU.)
    """
    index_R = top_k_index_TK.flatten().long()
    return index_R.new_zeros(num_experts, dtype=torch.int64).scatter_add_(0, index_R, torch.ones_like(index_R))


def expert_order(top_k_index_TK: Tensor) -> tuple[Tensor, Tensor]:
    """`order_R`: which (token, k) slot each row of expert order comes from; `inverse_R`: where each slot went.

    The sort is stable, so rows of one expert stay in token order and results do not depend on the device's sort.
    """
    order_R = top_k_index_TK.flatten().argsort(stable=True)
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(order_R.numel(), device=order_R.device)
    return order_R, inverse_R


class Context(FunctionCtx):
    """What forward leaves for backward."""

    saved_tensors: tuple[Tensor, ...]
    top_k: int


class _ToExperts(torch.autograd.Function):
    """rows[r] = hidden[order[r] // K]; a token's gradient is the fp32 sum of its K rows, in order, rounded once."""

    @staticmethod
    def forward(ctx: Context, hidden_TH: Tensor, order_R: Tensor, inverse_R: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse_R)
        ctx.top_k = top_k
        return hidden_TH.index_select(0, order_R // top_k)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse_R,) = ctx.saved_tensors
        first_T, *others = inverse_R.view(-1, ctx.top_k).unbind(1)
        total_TH = grads[0].index_select(0, first_T).to(at_least_fp32(grads[0].dtype))
        for inverse_T in others:
            total_TH += grads[0].index_select(0, inverse_T)
        return total_TH.to(grads[0].dtype), None, None, None


def to_experts(hidden_TH: Tensor, order_R: Tensor, inverse_R: Tensor, top_k: int) -> Tensor:
    """Copy every token to its K places in expert order: [R, H], the dtype of `hidden_TH`."""
    return _ToExperts.apply(hidden_TH, order_R, inverse_R, top_k)

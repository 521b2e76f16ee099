"""Tokens to expert order and back, without atomics in either direction."""
# Shapes: T tokens, K experts per token, H hidden, R = T * K rows in expert order.

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


def count_tokens(top_k_index_TK: Tensor, num_experts: int) -> Tensor:
    """Rows of each expert [E] int64. (`histc` has no integer kernel on the CPU and counts in float.)"""
    return torch.bincount(top_k_index_TK.flatten(), minlength=num_experts)


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
    """rows[r] = hidden[order[r] // K]; the gradient of a token is the sum of its K rows, in a fixed order."""

    @staticmethod
    def forward(ctx: Context, hidden_TH: Tensor, order_R: Tensor, inverse_R: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse_R)
        ctx.top_k = top_k
        return hidden_TH.index_select(0, order_R // top_k)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse_R,) = ctx.saved_tensors
        slots_RH = grads[0].index_select(0, inverse_R)
        return slots_RH.unflatten(0, (slots_RH.shape[0] // ctx.top_k, ctx.top_k)).sum(1), None, None, None


class _FromExperts(torch.autograd.Function):
    """slots[s] = rows[inverse[s]]: a permutation, whose gradient is the opposite permutation (and is contiguous)."""

    @staticmethod
    def forward(ctx: Context, rows_RH: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(order_R)
        return rows_RH.index_select(0, inverse_R)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order_R,) = ctx.saved_tensors
        return grads[0].index_select(0, order_R), None, None


def to_experts(hidden_TH: Tensor, order_R: Tensor, inverse_R: Tensor, top_k: int) -> Tensor:
    """Copy every token to its K places in expert order: [R, H], the dtype of `hidden_TH`."""
    return _ToExperts.apply(hidden_TH, order_R, inverse_R, top_k)


def from_experts(rows_RH: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Undo the order: row t * K + k of the result [R, H] is what token t's k-th expert returned."""
    return _FromExperts.apply(rows_RH, order_R, inverse_R)

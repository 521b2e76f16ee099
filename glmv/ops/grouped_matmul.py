"""Rows sorted by group, times one matrix per group, with gradients that are right for every split."""
# Shapes: R rows, E groups, M in, N out.

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

ALIGNMENT_BYTES = 16  # grouped_mm: "strides should be multiple of 16 bytes"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_unsupported(weight_EMN: Tensor) -> str | None:
    """Why `torch.nn.functional.grouped_mm` cannot take this weight or its transpose; None when it can."""
    if weight_EMN.dtype not in DTYPES:
        return f"dtype {str(weight_EMN.dtype).removeprefix('torch.')} has no grouped kernel"
    for size in weight_EMN.shape[1:]:
        if size * weight_EMN.element_size() % ALIGNMENT_BYTES:
            return f"a row of {size} elements is no multiple of {ALIGNMENT_BYTES} bytes"
    return None


class Context(FunctionCtx):
    """What forward leaves for backward."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _GroupedMatmul(torch.autograd.Function):
    """Own backward, because PyTorch's refuses expanded gradients and promises nothing for groups without rows."""

    @staticmethod
    def forward(ctx: Context, rows_RM: Tensor, weight_EMN: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RM, weight_EMN, ends_E)
        if rows_RM.shape[0] == 0:
            return rows_RM.new_zeros(0, weight_EMN.shape[2])
        return F.grouped_mm(rows_RM, weight_EMN, offs=ends_E)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows_RM, weight_EMN, ends_E = ctx.saved_tensors
        if rows_RM.shape[0] == 0:
            return torch.zeros_like(rows_RM), torch.zeros_like(weight_EMN), None
        grad_RN = grads[0].contiguous()
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = F.grouped_mm(grad_RN, weight_EMN.transpose(1, 2), offs=ends_E)
        if ctx.needs_input_grad[1]:
            grad_weight = F.grouped_mm(rows_RM.transpose(0, 1), grad_RN, offs=ends_E)
            # A vendor kernel may return from an empty group without writing: dW would be uninitialised memory.
            grad_weight.masked_fill_((ends_E.diff(prepend=ends_E.new_zeros(1)) == 0)[:, None, None], 0)
        return grad_rows, grad_weight, None


def grouped_matmul(rows_RM: Tensor, weight_EMN: Tensor, counts_E: Tensor) -> Tensor:
    """rows of group e @ weight[e] -> [R, N].

    Args:
        rows_RM: sorted by group, contiguous; no rows beyond `counts_E.sum()`.
        weight_EMN: one matrix a group; see `why_unsupported`.
        counts_E: rows of each group, int64; zeros anywhere are fine and give that group a gradient of exact zeros.
    """
    return _GroupedMatmul.apply(rows_RM, weight_EMN, counts_E.cumsum(0).to(torch.int32))

"""The gradient of a matmul of rows sorted by group, whichever kernels multiply."""
# Shapes: R rows, E groups, M in, N out.

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


class Context(FunctionCtx):
    """What forward leaves for backward."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    times_weight: Product
    weight_gradient: Product


class GroupedMatmul(torch.autograd.Function):
    """rows of group e @ weight[e] -> [R, N].

    PyTorch's own gradient refuses expanded ones and promises nothing for groups without rows; the NPU has none.

    Args:
        rows_RM: sorted by group, contiguous.   weight_EMN: one matrix a group.   ends_E: where each group ends.
        times_weight: (rows_RM, weight_EMN, ends_E) -> [R, N]; gets a transposed view of the weight in backward.
        weight_gradient: (rows_RM, grad_RN, ends_E) -> [E, M, N]; zeros for a group without rows, if there is any row.
    """

    @staticmethod
    def forward(
        ctx: Context,
        rows_RM: Tensor,
        weight_EMN: Tensor,
        ends_E: Tensor,
        times_weight: Product,
        weight_gradient: Product,
    ) -> Tensor:
        """The product; of no rows, no rows."""
        ctx.save_for_backward(rows_RM, weight_EMN, ends_E)
        ctx.times_weight, ctx.weight_gradient = times_weight, weight_gradient
        if rows_RM.shape[0] == 0:
            return rows_RM.new_zeros(0, weight_EMN.shape[2])
        return times_weight(rows_RM, weight_EMN, ends_E)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """Gradients of rows and weights, as far as they are wanted."""
        rows_RM, weight_EMN, ends_E = ctx.saved_tensors
        # Without any row a kernel may return before it has written anything: dW would be uninitialised memory.
        if rows_RM.shape[0] == 0:
            return torch.zeros_like(rows_RM), torch.zeros_like(weight_EMN), None, None, None
        grad_RN = grads[0].contiguous()
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = ctx.times_weight(grad_RN, weight_EMN.transpose(1, 2), ends_E)
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.weight_gradient(rows_RM, grad_RN, ends_E)
        return grad_rows, grad_weight, None, None, None

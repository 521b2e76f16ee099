"""Rows sorted by group, times one matrix per group, by npu_grouped_matmul, which has no gradient of its own."""
# Shapes: R rows, E groups, M in, N out.

from torch import Tensor

from glmv.ops.grouped_autograd import GroupedMatmul
from glmv.ops.npu.library import torch_npu, why_not_dtype

MAX_GROUPS = 1024
MAX_INNER_AXIS = 65535
# group_type: which axis the groups divide.
ROWS, CONTRACTION = 0, 2
# group_list_type: where each group ends. (1 would be counts; of those the operator refuses a list of one.)
ENDS = 0
ONE_OUTPUT = 3  # split_item


def why_unsupported(weight_EMN: Tensor) -> str | None:
    """Why npu_grouped_matmul cannot take this weight; None when it can."""
    groups, inner, outer = weight_EMN.shape
    if groups > MAX_GROUPS:
        return f"{groups} experts are more than {MAX_GROUPS}"
    if max(inner, outer) > MAX_INNER_AXIS:
        return f"a matrix of {inner} x {outer} is too large"
    return why_not_dtype(weight_EMN)


def _times_weight(rows_RM: Tensor, weight_EMN: Tensor, ends_E: Tensor) -> Tensor:
    """rows of group e @ weight[e] -> [R, N]; the weight may be a transposed view, the rows may not."""
    options = {"split_item": ONE_OUTPUT, "group_type": ROWS, "group_list_type": ENDS}
    return torch_npu().npu_grouped_matmul([rows_RM], [weight_EMN], group_list=ends_E, **options)[0]


def weight_gradient(rows_RM: Tensor, grad_RN: Tensor, ends_E: Tensor) -> Tensor:
    """rows^T @ grad of each group -> [E, M, N]; zeros for a group without rows, if there is any row at all."""
    options = {"split_item": ONE_OUTPUT, "group_type": CONTRACTION, "group_list_type": ENDS}
    # A transposed view, as the kernel wants it: it tells by the strides, and refuses the same numbers laid out anew.
    return torch_npu().npu_grouped_matmul([rows_RM.t()], [grad_RN], group_list=ends_E, **options)[0]


def grouped_matmul(rows_RM: Tensor, weight_EMN: Tensor, counts_E: Tensor) -> Tensor:
    """rows of group e @ weight[e] -> [R, N], accumulated in fp32 and rounded once; no host synchronisation.

    Args:
        rows_RM: sorted by group; no rows beyond `counts_E.sum()`.
        weight_EMN: one matrix a group, in the dtype of the rows; see `why_unsupported`.
        counts_E: rows of each group, int64, on the device. Zeros anywhere, and no rows at all, are fine: a group
            without rows has a gradient of exact zeros.
    """
    ends_E = counts_E.cumsum(0)
    return GroupedMatmul.apply(rows_RM.contiguous(), weight_EMN, ends_E, _times_weight, weight_gradient)

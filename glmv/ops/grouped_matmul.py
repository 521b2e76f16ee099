"""Rows sorted by group, times one matrix per group, with gradients that are right for every split."""
# Shapes: R rows, E groups, M in, N out.

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from glmv.ops.grouped_autograd import GroupedMatmul

ALIGNMENT_BYTES = 16  # grouped_mm: "strides should be multiple of 16 bytes"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A CPU with one of these multiplies matrices of the dtype in its own instructions.
CPU_HAS = {torch.bfloat16: ("avx512_bw", "avx_ne_convert", "bf16"), torch.float16: ("avx512_fp16", "fp16_arith")}


def why_unsupported(weight_EMN: Tensor) -> str | None:
    """Why `torch.nn.functional.grouped_mm` cannot take this weight or its transpose; None when it can."""
    if weight_EMN.dtype not in DTYPES:
        return f"dtype {str(weight_EMN.dtype).removeprefix('torch.')} has no grouped kernel"
    for size in weight_EMN.shape[1:]:
        if size * weight_EMN.element_size() % ALIGNMENT_BYTES:
            return f"a row of {size} elements is no multiple of {ALIGNMENT_BYTES} bytes"
    return None


@functools.cache
def cpu_multiplies_wide(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies `dtype` faster as fp32: without instructions for it, 5 to 50 times.

    The result is the same: products of 16-bit numbers are exact in fp32, sums are fp32 either way, rounded once.
    """
    if dtype not in CPU_HAS:
        return False
    found = torch.cpu.get_capabilities()
    return not any(found.get(name, False) for name in CPU_HAS[dtype])


def _is_wide(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and cpu_multiplies_wide(tensor.dtype)


def _spans(ends_E: Tensor) -> Iterator[slice]:
    ends = ends_E.tolist()
    return map(slice, [0, *ends], ends)


def _times_weight(rows_RM: Tensor, weight_EMN: Tensor, ends_E: Tensor) -> Tensor:
    """rows of group e @ weight[e] -> [R, N]; the weight may be a transposed view."""
    if not _is_wide(weight_EMN):
        return F.grouped_mm(rows_RM, weight_EMN, offs=ends_E)
    product_RN = rows_RM.new_empty(rows_RM.shape[0], weight_EMN.shape[2])
    for span, weight_MN in zip(_spans(ends_E), weight_EMN, strict=True):
        if span.start < span.stop:
            product_RN[span] = rows_RM[span].float() @ weight_MN.float()
    return product_RN


def _weight_gradient(rows_RM: Tensor, grad_RN: Tensor, ends_E: Tensor) -> Tensor:
    """rows^T @ grad of each group -> [E, M, N]; exact zeros for a group without rows."""
    if _is_wide(rows_RM):
        grad_EMN = rows_RM.new_empty(len(ends_E), rows_RM.shape[1], grad_RN.shape[1])
        for span, grad_MN in zip(_spans(ends_E), grad_EMN, strict=True):
            grad_MN.copy_(rows_RM[span].float().T @ grad_RN[span].float())
        return grad_EMN
    grad_EMN = F.grouped_mm(rows_RM.transpose(0, 1), grad_RN, offs=ends_E)
    empty_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
    # A vendor kernel may return from an empty group without writing: dW would be uninitialised memory.
    if grad_EMN.device.type == "cpu":  # a masked fill reads and writes every expert, and here asking costs nothing
        for expert in empty_E.nonzero().flatten().tolist():
            grad_EMN[expert].zero_()
        return grad_EMN
    return grad_EMN.masked_fill_(empty_E[:, None, None], 0)


def grouped_matmul(rows_RM: Tensor, weight_EMN: Tensor, counts_E: Tensor) -> Tensor:
    """rows of group e @ weight[e] -> [R, N].

    Args:
        rows_RM: sorted by group, contiguous; no rows beyond `counts_E.sum()`.
        weight_EMN: one matrix a group; see `why_unsupported`.
        counts_E: rows of each group, int64; zeros anywhere are fine and give that group a gradient of exact zeros.
    """
    ends_E = counts_E.cumsum(0).to(torch.int32)
    return GroupedMatmul.apply(rows_RM, weight_EMN, ends_E, _times_weight, _weight_gradient)

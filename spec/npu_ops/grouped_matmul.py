"""Matrix products of groups of rows: experts' forward, their gradient to rows and their gradient to weights.

Source: op-plugin's documentation of npu_grouped_matmul and the checks and kernels of aclnnGroupedMatmul (V4/V5).
"""

# Shapes: M rows of all groups, E groups, K contracted, N columns.

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from spec.npu_ops.contract import Call, Contract, wide
from spec.npu_ops.refuse import check_dtype, refuse_if, refuse_undescribed

OPERATOR = "npu_grouped_matmul"
BY_ROWS, BY_CONTRACTION = 0, 2
ENDS, COUNTS = 0, 1
LONGEST_INNER_AXIS = 65535
BIAS_DTYPE = {torch.float16: torch.float16, torch.bfloat16: torch.float32, torch.float32: torch.float32}


def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    offset: list[Tensor] | None = None,
    antiquant_scale: list[Tensor] | None = None,
    antiquant_offset: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    activation_input: list[Tensor] | None = None,
    activation_quant_scale: list[Tensor] | None = None,
    activation_quant_offset: list[Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: list[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[Tensor]:
    """One product per group, accumulated in float32 and rounded once. NOT differentiable.

    group_type 0 splits rows: x [M, K] times weight [E, K, N] gives [M, N].
    group_type 2 splits the contraction: x [K, M], a transposed view, times weight [M, N] gives [E, K, N]; a group
    without rows gives zeros. But with M = 0 the device returns without launching its kernel: the result is memory that
    nobody wrote, and NaN here, so that a caller who does not guard against it is seen.

    Args:
        group_list: int64 [E]; rows per group (group_list_type 1) or where each group ends (0).
        bias: with group_type 0 one tensor [E, N]; float32 for bfloat16 rows, else their dtype.
    """
    assert group_list is not None
    rows, matrix, groups = x[0], weight[0], spans(group_list, group_list_type)
    dtype = wide(rows)
    if group_type == BY_CONTRACTION:
        if rows.size(1) == 0:
            return [rows.new_full((len(groups), rows.size(0), matrix.size(1)), float("nan"))]
        return [torch.stack([rows[:, at].to(dtype) @ matrix[at].to(dtype) for at in groups]).to(rows.dtype)]
    products = [rows[at].to(dtype) @ matrix[e].to(dtype) for e, at in enumerate(groups)]
    if bias is not None:
        products = [product + bias[0][e].to(dtype) for e, product in enumerate(products)]
    return [torch.cat(products).to(rows.dtype)]


def spans(group_list: Tensor, group_list_type: int | None) -> list[slice]:
    """The rows of every group."""
    ends = group_list.cumsum(0) if group_list_type == COUNTS else group_list
    return [slice(first, last) for first, last in pairwise([0, *ends.tolist()])]


def is_transposed(tensor: Tensor) -> bool:
    """Whether the last two dims are a transposed view, by the strides alone, as the device's operator decides it."""
    rows, columns = tensor.shape[-2:]
    by_stride = tensor.stride(-2) == 1 and tensor.stride(-1) == rows
    stacked = tensor.dim() == 2 or tensor.stride(0) == rows * columns
    return by_stride and stacked and (rows, columns) != (1, 1)


def refuse_grouped_matmul(call: Call) -> None:
    """What npu_grouped_matmul refuses."""
    refuse_options(call)
    x, weight = call.x[0], call.weight[0]
    check_dtype("x", x)
    refuse_if(weight.dtype != x.dtype, f"{OPERATOR}: x is {x.dtype} but weight is {weight.dtype}")
    refuse_group_list(call.group_list, call.group_list_type)
    by_rows = call.group_type == BY_ROWS
    (refuse_by_rows if by_rows else refuse_by_contraction)(x, weight, call)
    groups = spans(call.group_list, call.group_list_type)
    refuse_if(any(at.start > at.stop for at in groups), f"{OPERATOR}: group_list must not name negative groups")
    total, rows = groups[-1].stop, x.size(0 if by_rows else 1)
    refuse_if(total != rows, f"{OPERATOR}: the groups have {total} rows, x has {rows}")
    inner = [x.size(-1) if by_rows else x.size(0), weight.size(-1)]
    refuse_if(max(inner) > LONGEST_INNER_AXIS, f"{OPERATOR}: inner axes have at most {LONGEST_INNER_AXIS} elements")


def refuse_options(call: Call) -> None:
    """Options that are missing, unknown, or not described here."""
    refuse_if(call.group_list is None, f"{OPERATOR}: without group_list it is not described by this contract")
    refuse_if(
        call.group_type is None,
        f"Requires manual passing group_type, current is {call.group_type}.",
    )
    refuse_if(
        call.group_type not in (BY_ROWS, BY_CONTRACTION),
        f"groupType only supports -1, 0 and 2 (and -1 is not described by this contract), but got {call.group_type}.",
    )
    refuse_if(
        call.split_item not in (2, 3),
        f"{OPERATOR}: split_item must be 2 or 3 for a single output, but got {call.split_item}",
    )
    refuse_if(call.group_list_type not in (ENDS, COUNTS), f"{OPERATOR}: group_list_type must be 0 or 1")
    refuse_if(call.act_type != 0, f"{OPERATOR}: no activation without quantisation")
    refuse_if(len(call.x) != 1 or len(call.weight) != 1, f"{OPERATOR}: x and weight must be one tensor each")
    known = {"x", "weight", "bias", "group_list", "split_item", "group_type", "group_list_type", "act_type"}
    refuse_undescribed(OPERATOR, **{name: value for name, value in vars(call).items() if name not in known})


def refuse_group_list(group_list: Tensor, group_list_type: int) -> None:
    """A list in the wrong dtype, shape or kind."""
    check_dtype("groupListOptional", group_list, (torch.int64,))
    refuse_if(group_list.dim() != 1, f"{OPERATOR}: group_list must be 1-dimensional")
    refuse_if(not 1 <= len(group_list) <= 1024, f"{OPERATOR}: group_list must have 1 to 1024 elements")
    refuse_if(
        group_list_type == COUNTS and len(group_list) == 1,
        f"{OPERATOR}: the length of group_list cannot be 1 when group_list_type is 1",
    )


def refuse_by_rows(x: Tensor, weight: Tensor, call: Call) -> None:
    """group_type 0."""
    refuse_if(x.dim() != 2 or weight.dim() != 3, f"{OPERATOR}: group_type 0 takes x [M, K] and weight [E, K, N]")
    refuse_if(is_transposed(x), "When groupType is 0, tensor in x should not be transposed.")
    refuse_if(x.size(1) != weight.size(1), f"{OPERATOR}: K of x is {x.size(1)}, of weight {weight.size(1)}")
    refuse_if(
        weight.size(0) != len(call.group_list),
        f"{OPERATOR}: weight has {weight.size(0)} groups, group_list {len(call.group_list)}",
    )
    if call.bias is not None:
        check_dtype("bias", call.bias[0], (BIAS_DTYPE[x.dtype],))
        shape = (weight.size(0), weight.size(2))
        refuse_if(len(call.bias) != 1 or call.bias[0].shape != shape, f"{OPERATOR}: bias must be one tensor {shape}")


def refuse_by_contraction(x: Tensor, weight: Tensor, call: Call) -> None:
    """group_type 2."""
    refuse_if(x.dim() != 2 or weight.dim() != 2, f"{OPERATOR}: group_type 2 takes x [K, M] and weight [M, N]")
    refuse_if(call.bias is not None, "When groupType is 2, bias must be empty.")
    refuse_if(not is_transposed(x), "When groupType is 2 and x is not separated, tensor in x should be transposed.")
    refuse_if(is_transposed(weight), "When groupType is 2, tensor in weight should not be transposed.")
    refuse_if(x.size(1) != weight.size(0), f"{OPERATOR}: M of x is {x.size(1)}, of weight {weight.size(0)}")


GROUPED_MATMUL = Contract(OPERATOR, grouped_matmul, refuse_grouped_matmul)

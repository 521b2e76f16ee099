"""Cases of the grouped product and of its pair with an exchange."""

# Shapes: M rows, E groups, K contracted, N columns, W ranks.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spec.npu_ops.cases.draws import Case, Draw
from spec.npu_ops.grouped_matmul import BIAS_DTYPE


def draw_grouped_matmul(draw: Draw) -> Case:
    """Forward, gradient to rows (a transposed view as weight) or gradient to weights."""
    contracted, columns, groups = draw.sizes(3, 2, 9)
    rows, dtype = draw.integer(1, 16), draw.dtype()
    counts = torch.tensor(draw.split(rows, groups))
    is_counts = draw.flag()
    kwargs: dict[str, Any] = {
        "group_list": counts if is_counts else counts.cumsum(0),
        "group_list_type": int(is_counts),
        "split_item": draw.integer(2, 3),
        "group_type": draw.choice([0, 0, 2]),
    }
    if kwargs["group_type"] == 2:
        x, weight = draw.normal(rows, contracted, dtype=dtype).t(), draw.tensor(rows, columns, dtype=dtype)
        return Case(([x], [weight]), kwargs)
    x = draw.tensor(rows, contracted, dtype=dtype)
    stored = draw.normal(groups, columns, contracted, dtype=dtype).mT
    weight = stored if draw.flag() else draw.tensor(groups, contracted, columns, dtype=dtype)
    if draw.flag():
        kwargs["bias"] = [draw.normal(groups, columns, dtype=BIAS_DTYPE[dtype])]
    return Case(([x], [weight]), kwargs)


def by_rows(x: Tensor, weight: Tensor, counts: list[int], **more: object) -> Case:
    """A product by rows with counts."""
    return Case(([x], [weight]), grouped(counts, 0) | more)


def by_contraction(x: Tensor, weight: Tensor, counts: list[int], **more: object) -> Case:
    """A gradient to weights with counts."""
    return Case(([x], [weight]), grouped(counts, 2) | more)


def grouped(counts: list[int], group_type: int) -> dict[str, Any]:
    """Options of a call with counts, or with ends where there is a single group."""
    return {
        "group_list": torch.tensor(counts, dtype=torch.int64),
        "group_list_type": int(len(counts) > 1),
        "split_item": 3,
        "group_type": group_type,
    }


def edges_grouped_matmul() -> list[Case]:
    """Groups without rows, a single group, and no rows at all."""
    draw = Draw.seeded(3)
    x, weight, grad = draw.normal(6, 4), draw.normal(3, 4, 5), draw.normal(6, 5)
    splits = {"first": [0, 4, 2], "last": [1, 5, 0], "all but one": [0, 6, 0]}
    return [
        *(by_rows(x, weight, split).labelled(f"forward, empty {name}") for name, split in splits.items()),
        *(
            by_contraction(x.t(), grad, split).labelled(f"weights' gradient, empty {name}")
            for name, split in splits.items()
        ),
        by_rows(x, weight[:1], [6]).labelled("forward, one group"),
        by_contraction(x.t(), grad, [6]).labelled("weights' gradient, one group"),
        by_rows(x[:0], weight, [0, 0, 0]).labelled("forward, no rows"),
        by_contraction(x[:0].t(), grad[:0], [0, 0, 0]).labelled("weights' gradient, no rows"),
        by_rows(grad, weight.mT, [1, 2, 3]).labelled("rows' gradient through a transposed view"),
        by_rows(draw.normal(6, 8)[:, ::2], weight, [1, 2, 3]).labelled("strided rows"),
    ]


def refusals_grouped_matmul() -> list[tuple[str, Case, str]]:
    """Calls that must be refused."""
    x, weight, grad, counts = torch.ones(6, 4), torch.ones(3, 4, 5), torch.ones(6, 5), [1, 2, 3]
    wrong_list = torch.tensor(counts, dtype=torch.int32)
    return [
        ("no group_type", by_rows(x, weight, counts, group_type=None), "Requires manual passing group_type"),
        ("group_type 1", by_rows(x, weight, counts, group_type=1), "groupType only supports"),
        ("int32 group_list", by_rows(x, weight, counts, group_list=wrong_list), "DT_INT32"),
        ("no group_list", by_rows(x, weight, counts, group_list=None), "without group_list"),
        ("one count", by_rows(x, weight[:1], [6], group_list_type=1), "length of group_list cannot be 1"),
        ("too many groups", by_rows(torch.ones(1025, 4), weight, [1] * 1025), "1 to 1024 elements"),
        ("3-D rows", by_rows(x[None], weight, counts), "takes x [M, K] and weight [E, K, N]"),
        ("two weights", Case(([x], [weight, weight]), by_rows(x, weight, counts).kwargs), "must be one tensor each"),
        ("2-D group_list", by_rows(x, weight, counts, group_list=torch.ones(3, 1).long()), "1-dimensional"),
        ("unknown list", by_rows(x, weight, counts, group_list_type=2), "group_list_type must be 0 or 1"),
        ("split_item 0", by_rows(x, weight, counts, split_item=0), "split_item must be 2 or 3"),
        ("activation", by_rows(x, weight, counts, act_type=1), "no activation"),
        ("quantisation", by_rows(x, weight, counts, scale=[x]), "scale="),
        ("groups and rows differ", by_rows(x, weight, [1, 2, 4]), "the groups have 7 rows, x has 6"),
        ("ends fall", by_rows(x, weight, [4, 2, 6], group_list_type=0), "negative groups"),
        ("counts as ends", by_rows(x, weight, counts, group_list_type=0), "the groups have 3 rows, x has 6"),
        ("K differs", by_rows(x, torch.ones(3, 5, 4), counts), "K of x is 4, of weight 5"),
        ("number of groups differs", by_rows(x, torch.ones(2, 4, 5), counts), "weight has 2 groups"),
        ("transposed rows", by_rows(torch.ones(4, 6).t(), weight, counts), "should not be transposed"),
        ("dtypes differ", by_rows(x, weight.half(), counts), "but weight is"),
        ("float64", by_rows(x.double(), weight.double(), counts), "DT_DOUBLE"),
        ("bias of another dtype", by_rows(x, weight, counts, bias=[torch.ones(3, 5).half()]), "bias not implemented"),
        ("bias of another shape", by_rows(x, weight, counts, bias=[torch.ones(5)]), "bias must be one tensor"),
        ("too wide", by_rows(torch.ones(2, 65536), torch.ones(2, 65536, 1), [1, 1]), "at most 65535"),
        ("contiguous x", by_contraction(x.t().contiguous(), grad, counts), "tensor in x should be transposed"),
        ("transposed gradient", by_contraction(x.t(), torch.ones(5, 6).t(), counts), "weight should not be transposed"),
        ("bias", by_contraction(x.t(), grad, counts, bias=[torch.ones(3, 5)]), "bias must be empty"),
        ("M differs", by_contraction(x.t(), grad[:5], counts), "M of x is 6, of weight 5"),
        ("3-D gradient", by_contraction(x.t(), weight, counts), "takes x [K, M]"),
    ]


def draw_alltoallv_gmm(draw: Draw) -> Case:
    """One rank's call; what it sends and receives need not match."""
    case = draw_exchange(draw)
    return Case(case.args, case.kwargs | {"permute_out_flag": draw.flag()})


def draw_exchange(draw: Draw) -> Case:
    """What both of the pair have in common."""
    ranks, experts, dtype = draw.choice([2, 4, 8]), draw.integer(1, 3), draw.choice([torch.float16, torch.bfloat16])
    sent, received = (draw.split(draw.integer(1, 20), ranks * experts) for _ in range(2))
    contracted, columns, batch = draw.sizes(3, 2, 9)
    swap, swap_shared = draw.flag(), draw.flag()
    kwargs: dict[str, Any] = {"trans_gmm_weight": swap, "trans_mm_weight": swap_shared}
    if draw.flag():
        shape = (columns, contracted) if swap_shared else (contracted, columns)
        kwargs |= {"mm_x": draw.normal(batch, contracted, dtype=dtype), "mm_weight": draw.normal(*shape, dtype=dtype)}
    shape = (columns, contracted) if swap else (contracted, columns)
    x, weight = draw.normal(sum(sent), contracted, dtype=dtype), draw.normal(experts, *shape, dtype=dtype)
    return Case((x, weight, "group", ranks, sent, received), kwargs)


def edges_alltoallv_gmm() -> list[Case]:
    """Experts that nobody chose."""
    return [idle_exchange(sent=[1, 0, 2, 3], received=[0, 0, 0, 0], rows=6)]


def edges_gmm_alltoallv() -> list[Case]:
    """Experts that nobody chose: there is nothing to multiply, and products of other ranks' experts come back."""
    return [idle_exchange(sent=[0, 0, 0, 0], received=[1, 0, 2, 3], rows=0)]


def idle_exchange(sent: list[int], received: list[int], rows: int) -> Case:
    """Two ranks of two experts each."""
    x, weight = torch.ones(rows, 4).half(), torch.ones(2, 4, 5).half()
    return Case((x, weight, "group", 2, sent, received), label="idle experts")


def refusals_exchange() -> list[tuple[str, Case, str]]:
    """Calls that must be refused."""
    x, weight, counts = torch.ones(6, 4).half(), torch.ones(3, 4, 5).half(), [1, 1, 1, 1, 1, 1]
    fine = (x, weight, "group", 2, counts, counts)
    return [
        ("float32", Case((x.float(), weight.float(), *fine[2:])), "gmm_x not implemented for DT_FLOAT"),
        ("one rank", Case((x, weight, "group", 1, counts[:3], counts[:3])), "ep_world_size should be in"),
        ("no communicator", Case((x, weight, "", *fine[3:])), "hcom must name a communicator"),
        ("counts of ranks only", Case((*fine[:4], [3, 3], counts)), "send_counts must be 6 counts"),
        ("rows and counts differ", Case((x[:5], *fine[1:])), "send_counts add up to 6, gmm_x has 5 rows"),
        ("K differs", Case((x[:, :3], *fine[1:])), "K of gmm_x is 3, of gmm_weight 4"),
        ("no rows", Case((x[:0], weight, "group", 2, [0] * 6, [0] * 6)), "BSK should be in (0, 52428800)"),
        ("dtypes differ", Case((x, weight.bfloat16(), *fine[2:])), "but gmm_weight is"),
        ("2-D weight", Case((x, weight[0], *fine[2:])), "gmm_weight 3"),
        ("33 experts", Case((x, weight[:1].expand(33, 4, 5), *fine[2:])), "1 to 32 experts on a rank"),
        ("384 experts", Case((x, weight, "group", 128, counts, counts)), "at most 256 experts in all"),
        ("counts on the device", Case(fine, {"send_counts_tensor": torch.ones(6)}), "send_counts_tensor"),
        ("half a shared product", Case(fine, {"mm_x": x}), "mm_x and mm_weight go together"),
    ]

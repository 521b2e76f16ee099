"""Expert parallel exchange fused with the experts' product, both ways.

Source: op-plugin's documentation, checks and tests of npu_alltoallv_gmm and npu_gmm_alltoallv, and the checks of
aclnnAlltoAllvGroupedMatMul on the host (Atlas A3). That code also narrows the numbers of ranks by chip, and in some
releases refuses less than 2 MB between two ranks; neither is described here.
"""

# Shapes: W ranks, E experts per rank, A rows sent, R rows received, K contracted, N columns.

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from spec.npu_ops.contract import Call, Contract, wide
from spec.npu_ops.refuse import check_dtype, refuse_if, refuse_undescribed

# Sends rows to all ranks and returns the rows received, both in rank order: (rows, sent per rank, received per rank).
Exchange = Callable[[Tensor, list[int], list[int]], Tensor]

# The communicators of this process by name; whoever runs the operators enters its own.
communicators: dict[str, Exchange] = {}

WORLD_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
MOST_EXPERTS, MOST_LOCAL_EXPERTS = 256, 32


def alltoallv_gmm(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: list[int],
    recv_counts: list[int],
    *,
    send_counts_tensor: Tensor | None = None,
    recv_counts_tensor: Tensor | None = None,
    mm_x: Tensor | None = None,
    mm_weight: Tensor | None = None,
    trans_gmm_weight: bool = False,
    trans_mm_weight: bool = False,
    permute_out_flag: bool = False,
    comm_mode: str | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Send rows to their experts' ranks, sort what arrives by expert, multiply. NOT differentiable.

    Args:
        gmm_x: [A, K], sorted by rank and there by expert.   gmm_weight: [E, K, N], or [E, N, K] with trans_gmm_weight.
        hcom: name of the communicator.
        send_counts: numbers of rows, to rank w for its expert e at w*E + e.
        recv_counts: numbers of rows, from rank w for own expert e at w*E + e.
        mm_x, mm_weight: one more product for the shared expert.
    Returns:
        product [R, N], sorted by expert and there by rank of origin; the shared product; and with `permute_out_flag`
        the sorted rows [R, K]. What was not asked for is None.
    """
    received = communicators[hcom](gmm_x, by_rank(send_counts, ep_world_size), by_rank(recv_counts, ep_world_size))
    permuted = sort_by_expert(received, recv_counts, ep_world_size)
    product = multiply_groups(permuted, gmm_weight, recv_counts, ep_world_size, trans_gmm_weight)
    return product, shared_product(mm_x, mm_weight, trans_mm_weight), permuted if permute_out_flag else None


def gmm_alltoallv(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    hcom: str,
    ep_world_size: int,
    send_counts: list[int],
    recv_counts: list[int],
    *,
    send_counts_tensor: Tensor | None = None,
    recv_counts_tensor: Tensor | None = None,
    mm_x: Tensor | None = None,
    mm_weight: Tensor | None = None,
    trans_gmm_weight: bool = False,
    trans_mm_weight: bool = False,
    comm_mode: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Multiply, sort by rank, send back: the way home of `alltoallv_gmm`, with its two count lists swapped.

    Args:
        gmm_x: [A, K], sorted by own expert and there by destination.
        send_counts: rows to rank w from own expert e at w*E + e.   recv_counts: rows from rank w, from its expert e.
    Returns:
        rows [R, N], sorted by rank and there by that rank's expert; and the shared product or None.
    """
    product = multiply_groups(gmm_x, gmm_weight, send_counts, ep_world_size, trans_gmm_weight)
    rows = sort_by_rank(product, send_counts, ep_world_size)
    received = communicators[hcom](rows, by_rank(send_counts, ep_world_size), by_rank(recv_counts, ep_world_size))
    return received, shared_product(mm_x, mm_weight, trans_mm_weight)


def grid(counts: Sequence[int], ranks: int) -> list[list[int]]:
    """Counts [W][E]."""
    experts = len(counts) // ranks
    return [list(counts[rank * experts : (rank + 1) * experts]) for rank in range(ranks)]


def by_rank(counts: Sequence[int], ranks: int) -> list[int]:
    """Rows per rank."""
    return [sum(row) for row in grid(counts, ranks)]


def by_expert(counts: Sequence[int], ranks: int) -> list[int]:
    """Rows per own expert."""
    return [sum(column) for column in zip(*grid(counts, ranks), strict=True)]


def sort_by_expert(rows: Tensor, counts: Sequence[int], ranks: int) -> Tensor:
    """From (rank, expert) order to (expert, rank) order."""
    return interleave(rows, counts, len(counts) // ranks)


def sort_by_rank(rows: Tensor, counts: Sequence[int], ranks: int) -> Tensor:
    """From (expert, rank) order to (rank, expert) order; `counts` are in (rank, expert) order."""
    turned = [count for column in zip(*grid(counts, ranks), strict=True) for count in column]
    return interleave(rows, turned, ranks)


def interleave(rows: Tensor, counts: Sequence[int], inner: int) -> Tensor:
    """Turns outer-major chunks of rows into inner-major ones."""
    chunks = rows.split(list(counts))
    return torch.cat([chunk for first in range(inner) for chunk in chunks[first::inner]])


def multiply_groups(rows: Tensor, weight: Tensor, counts: Sequence[int], ranks: int, transposed: bool) -> Tensor:
    """Each expert's product, in float32, rounded once."""
    dtype = wide(rows)
    weight = (weight.mT if transposed else weight).to(dtype)
    spans = pairwise(accumulate(by_expert(counts, ranks), initial=0))
    return torch.cat([rows[a:b].to(dtype) @ weight[e] for e, (a, b) in enumerate(spans)]).to(rows.dtype)


def shared_product(x: Tensor | None, weight: Tensor | None, transposed: bool) -> Tensor | None:
    """The shared expert's product."""
    if x is None or weight is None:
        return None
    dtype = wide(x)
    return (x.to(dtype) @ (weight.mT if transposed else weight).to(dtype)).to(x.dtype)


def exchange_all(rows: Sequence[Tensor], sent: Sequence[list[int]]) -> list[Tensor]:
    """What every rank receives when rank r sends `rows[r]`, cut by `sent[r]`: all ranks simulated in one process."""
    cut = [own.split(counts) for own, counts in zip(rows, sent, strict=True)]
    return [torch.cat(list(pieces)) for pieces in zip(*cut, strict=True)]


def refuse_alltoallv_gmm(call: Call) -> None:
    """What npu_alltoallv_gmm refuses."""
    refuse_exchange("npu_alltoallv_gmm", call, routed=call.send_counts)


def refuse_gmm_alltoallv(call: Call) -> None:
    """What npu_gmm_alltoallv refuses."""
    refuse_exchange("npu_gmm_alltoallv", call, routed=call.recv_counts)


def refuse_exchange(operator: str, call: Call, routed: list[int]) -> None:
    """What both refuse.

    Args:
        routed: counts of the rows that this rank routes to experts. (Its own experts may be given none.)
    """
    refuse_undescribed(
        operator,
        send_counts_tensor=call.send_counts_tensor,
        recv_counts_tensor=call.recv_counts_tensor,
        comm_mode=call.comm_mode,
    )
    x, weight, ranks = call.gmm_x, call.gmm_weight, call.ep_world_size
    for name in ("gmm_x", "gmm_weight", "mm_x", "mm_weight"):
        check_dtype(name, getattr(call, name), (torch.float16, torch.bfloat16))
    refuse_if(weight.dtype != x.dtype, f"{operator}: gmm_x is {x.dtype} but gmm_weight is {weight.dtype}")
    refuse_if(x.dim() != 2 or weight.dim() != 3, f"{operator}: gmm_x must have 2 dims and gmm_weight 3")
    refuse_if(ranks not in WORLD_SIZES, f"The input ep_world_size should be in {list(WORLD_SIZES)}, but got {ranks}")
    refuse_if(not 0 < len(call.hcom) < 128, f"{operator}: hcom must name a communicator in fewer than 128 characters")
    experts = weight.size(0)
    refuse_if(not 0 < experts <= MOST_LOCAL_EXPERTS, f"{operator}: 1 to {MOST_LOCAL_EXPERTS} experts on a rank")
    refuse_if(experts * ranks > MOST_EXPERTS, f"{operator}: at most {MOST_EXPERTS} experts in all")
    for name in ("send_counts", "recv_counts"):
        counts = getattr(call, name)
        fits = len(counts) == experts * ranks and min(counts) >= 0
        refuse_if(not fits, f"{operator}: {name} must be {experts * ranks} counts, experts times ranks")
    refuse_if(sum(routed) == 0, f"{operator}: BSK should be in (0, 52428800), but got 0.")
    sent = sum(call.send_counts)
    refuse_if(sent != x.size(0), f"{operator}: send_counts add up to {sent}, gmm_x has {x.size(0)} rows")
    contracted = weight.size(2 if call.trans_gmm_weight else 1)
    refuse_if(contracted != x.size(1), f"{operator}: K of gmm_x is {x.size(1)}, of gmm_weight {contracted}")
    refuse_if((call.mm_x is None) != (call.mm_weight is None), f"{operator}: mm_x and mm_weight go together")


ALLTOALLV_GMM = Contract("npu_alltoallv_gmm", alltoallv_gmm, refuse_alltoallv_gmm)
GMM_ALLTOALLV = Contract("npu_gmm_alltoallv", gmm_alltoallv, refuse_gmm_alltoallv)

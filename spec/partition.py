"""Which rank holds and computes what: the rules by which a layout spreads experts, rows and tokens.

Source: PyTorch's DTensor (`Shard` splits as `torch.chunk` does) and DeviceMesh (ranks in row-major order of the axes);
Lepikhin et al., GShard (arXiv 2006.16668) for expert parallelism.
"""

# Shapes: T tokens, K experts per token, P expert-parallel ranks.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def coordinate(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Where a rank stands on each axis of a mesh; the last axis moves fastest."""
    place = []
    for size in reversed(sizes):
        rank, position = divmod(rank, size)
        place.append(position)
    return tuple(reversed(place))


def shard(length: int, parts: int) -> list[range]:
    """The indices that each part of a split axis holds: ceil(length / parts) each, fewer or none at the end."""
    each = -(-length // parts)
    return [range(min(part * each, length), min((part + 1) * each, length)) for part in range(parts)]


def holder(index: int, length: int, parts: int) -> int:
    """The part that holds an index."""
    return next(part for part, held in enumerate(shard(length, parts)) if index in held)


def exchanged_rows(top_k_index_TK: Sequence[Tensor], experts: int) -> Tensor:
    """Rows that expert-parallel rank p sends to rank q, [P, P] int64: one for each (token, expert) pair.

    Args:
        top_k_index_TK: of each rank, the experts of its tokens.   experts: how many there are, over all ranks.
    """
    parts = len(top_k_index_TK)
    rows_PP = torch.zeros(parts, parts, dtype=torch.int64)
    for source, index_TK in enumerate(top_k_index_TK):
        for target, held in enumerate(shard(experts, parts)):
            rows_PP[source, target] = ((index_TK >= held.start) & (index_TK < held.stop)).sum()
    return rows_PP

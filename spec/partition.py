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


def zigzag(length: int, ring: int, chunk: int | None = None) -> list[list[int]]:
    """Tokens of one document that each of `ring` ranks holds, in order; -1 where padding stands.

    Source: Brandon et al., Striped Attention (arXiv 2311.09431), section 3, on why contiguous parts are unbalanced; two
    chunks a rank, r and 2 ring - 1 - r, as Llama 3's context parallelism has them (arXiv 2407.21783, section 3.3.2).

    Args:
        chunk: tokens of one of the 2 ring chunks; None for as few as hold the document.
    """
    if ring == 1:
        return [[token if token < length else -1 for token in range(chunk or length)]]
    chunk = chunk or -(-length // (2 * ring))
    held = []
    for rank in range(ring):
        places = [part * chunk + offset for part in (rank, 2 * ring - 1 - rank) for offset in range(chunk)]
        held.append([token if token < length else -1 for token in places])
    return held


def sequence_parts(document_BS: Tensor, ring: int, ulysses: int) -> Tensor:
    """Which token of each row stands where, [ring * ulysses, B, L] int64; -1 where padding stands.

    Rank q of the R x U ranks that share a sequence is rank q mod U of ring rank q // U. Every document of a row is
    dealt out by `zigzag` on its own, in chunks as long as the longest document with the same number needs in any row;
    then each ring rank's row is cut into U pieces of one length. A batch without any token has a document of padding.

    Args:
        document_BS: number of each token's document, rising along a row; -1 is padding, which nobody holds.
    """
    chunks = 1 if ring == 1 else 2 * ring
    numbers = range(max(int(document_BS.max()), 0) + 1)
    longest = [max(int((document_BS == number).sum(1).max()), 1) for number in numbers]
    rows: list[list[list[int]]] = []
    for document_S in document_BS:
        held: list[list[int]] = [[] for _ in range(ring)]
        for number, most in zip(numbers, longest, strict=True):
            token = (document_S == number).nonzero().flatten().tolist()
            for rank, places in enumerate(zigzag(len(token), ring, -(-most // chunks))):
                held[rank] += [token[place] if place >= 0 else -1 for place in places]
        rows.append(held)
    width = -(-len(rows[0][0]) // ulysses)
    parts_RUBL = torch.full((ring, ulysses, len(rows), width), -1, dtype=torch.int64)
    for row, held in enumerate(rows):
        for rank, places in enumerate(held):
            for place, token in enumerate(places):
                parts_RUBL[rank, place // width, row, place % width] = token
    return parts_RUBL.flatten(0, 1)

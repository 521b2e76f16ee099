"""Which rank holds which token of a sequence that several ranks share, and where it stands there.

Each document is cut into 2 R chunks for R ring ranks, and ring rank r holds chunks r and 2 R - 1 - r: an early one,
whose queries see little, with a late one, whose queries see much. So all have the same work under a causal mask.

    one document of 12 tokens, ring 2           chunks  0 1 2 | 3 4 5 | 6 7 8 | 9 10 11
        ring rank 0    0 1 2 9 10 11
        ring rank 1    3 4 5 6 7 8
    each cut in two for ulysses 2               ranks   0: 0 1 2   1: 9 10 11   2: 3 4 5   3: 6 7 8

Without a ring a document is one piece. Documents of a packed row are dealt out one by one, so that each is balanced on
its own; a padded row is one document. What does not fill a chunk is padded at its end: behind all tokens of its
document, where causal attention lets none of them look. Padding of the batch itself is left out: no rank holds it.

All of it is counted on the host, from document numbers that every rank of the group has.
"""
# Shapes: B batch, S sequence, R ring ranks, U ulysses ranks, C places of a ring rank, L places of a rank.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PADDING = -1


@dataclass(frozen=True)
class Degrees:
    """How many ranks share a sequence: ring x ulysses, ulysses neighbours having consecutive ranks."""

    ring: int = 1
    ulysses: int = 1

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return self.ring * self.ulysses

    def place(self, rank: int) -> tuple[int, int]:
        """(ring rank, ulysses rank) of a rank among those that share a sequence."""
        return divmod(rank, self.ulysses)


@dataclass(frozen=True)
class Partition:
    """One rank's part of a micro-batch.

    Attributes:
        index_BL: which token of its unsplit row stands at each place, int64 on the host; -1 at padding. L is the same
            on all ranks that share the sequence.
        length: S of the unsplit rows.
        documents: places of each document among the C of this rank's ring rank, the same on all ranks. What stands
            behind them is padding.
    """

    index_BL: Tensor
    length: int
    documents: tuple[int, ...]

    @classmethod
    def of(cls, document_BS: Tensor, degrees: Degrees, rank: int) -> Partition:
        """The part of rank `rank` of those that share a sequence.

        Args:
            document_BS: from `glmv.ops.documents.document_ids`, on the host.
        """
        ring_rank, ulysses_rank = degrees.place(rank)
        rows = [_tokens_by_document(document_S) for document_S in document_BS]
        longest = [max(map(len, same)) for same in _transposed(rows)] or [1]  # no token: padding stands for a document
        chunks = [_chunk(most, degrees.ring) for most in longest]
        held_BC = torch.stack([_held(tokens, chunks, degrees.ring, ring_rank) for tokens in rows])
        width = -(-held_BC.shape[1] // degrees.ulysses)
        held_BC = F.pad(held_BC, (0, width * degrees.ulysses - held_BC.shape[1]), value=PADDING)
        documents = tuple(chunk * (1 if degrees.ring == 1 else 2) for chunk in chunks)
        own = slice(ulysses_rank * width, (ulysses_rank + 1) * width)
        return cls(held_BC[:, own].contiguous(), document_BS.shape[1], documents)

    def split(self, whole_BS: Tensor, fill: float) -> Tensor:
        """This rank's part [..., B, L] of [..., B, S], on the device of `whole_BS`; `fill` at padding.

        Raises:
            ValueError: the last two dims are not those of the micro-batch.
        """
        batch, shape = (len(self.index_BL), self.length), whole_BS.shape
        if shape[-2:] != batch:
            raise ValueError(f"a tensor {list(shape)} does not end in batch and sequence {list(batch)}")
        index_BL = self.index_BL.to(whole_BS.device)
        taken = index_BL.clamp(min=0).expand(*shape[:-2], -1, -1)
        return whole_BS.gather(-1, taken).masked_fill(index_BL == PADDING, fill)


def join(parts: Sequence[Tensor], partitions: Sequence[Partition], fill: float) -> Tensor:
    """What `split` took apart: [B, S, ...] of all ranks' [B, L, ...]; `fill` where the batch itself has padding."""
    first, partition = parts[0], partitions[0]
    whole = first.new_full((first.shape[0], partition.length, *first.shape[2:]), fill)
    for part, own in zip(parts, partitions, strict=True):
        row, place = (own.index_BL != PADDING).nonzero(as_tuple=True)
        whole[row, own.index_BL[row, place]] = part[row, place]
    return whole


def _tokens_by_document(document_S: Tensor) -> list[Tensor]:
    """Places of the tokens of each document, whose numbers rise along the row."""
    real = document_S != PADDING
    return list(real.nonzero().flatten().split(document_S[real].bincount().tolist()))


def _transposed(rows: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Of every row the document with the same number, where it has one."""
    most = max(map(len, rows), default=0)
    return [[row[number] for row in rows if number < len(row)] for number in range(most)]


def _chunk(longest: int, ring: int) -> int:
    return longest if ring == 1 else -(-longest // (2 * ring))


def _held(tokens: Sequence[Tensor], chunks: Sequence[int], ring: int, rank: int) -> Tensor:
    """What one ring rank holds of a row, [C]."""
    nothing = torch.zeros(0, dtype=torch.int64)
    pieces = [nothing]
    for number, chunk in enumerate(chunks):
        own = tokens[number] if number < len(tokens) else nothing
        count = 1 if ring == 1 else 2 * ring
        padded = F.pad(own, (0, count * chunk - len(own)), value=PADDING).view(count, chunk)
        pieces.append(padded if ring == 1 else padded[[rank, 2 * ring - 1 - rank]])
    return torch.cat([piece.flatten() for piece in pieces])

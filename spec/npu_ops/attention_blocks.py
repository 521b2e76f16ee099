"""How fused attention lays out its tensors, and in which order its statistics lie in memory."""

# Shapes: B batch, S sequence, N heads, D head dim, H = N*D, T tokens of all sequences.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from spec.npu_ops.contract import Call

LAYOUTS = {"BSH": 3, "SBH": 3, "BNSD": 4, "BSND": 4, "TND": 3}
REPEATS = 8


@dataclass(frozen=True)
class Blocks:
    """Cuts a call's tensors into blocks [B, N, S, D] that attend on their own, and puts results back together.

    TND has one block per sequence (B = 1), every other layout a single one.
    """

    layout: str
    query_heads: int
    key_heads: int
    query_ends: tuple[int, ...] = ()
    key_ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, call: Call) -> Blocks:
        """The blocks of one call."""
        return cls(
            call.input_layout,
            call.head_num,
            key_heads(call),
            sequence_ends(call.actual_seq_qlen),
            sequence_ends(call.actual_seq_kvlen),
        )

    def queries(self, x: Tensor) -> list[Tensor]:
        """Blocks of a tensor with the query's heads and positions."""
        return cut(x, self.layout, self.query_heads, self.query_ends)

    def keys(self, x: Tensor) -> list[Tensor]:
        """Blocks of a tensor with the keys' heads and positions."""
        return cut(x, self.layout, self.key_heads, self.key_ends)

    def join(self, blocks: Sequence[Tensor]) -> Tensor:
        """The whole tensor, contiguous in the call's layout."""
        if self.layout == "TND":
            return torch.cat([block[0].transpose(0, 1) for block in blocks])
        whole = blocks[0]
        if self.layout == "BNSD":
            return whole.contiguous()
        whole = whole.permute(2, 0, 1, 3) if self.layout == "SBH" else whole.transpose(1, 2)
        return whole.contiguous() if self.layout == "BSND" else whole.flatten(2)

    def join_statistics(self, blocks: Sequence[Tensor], softmax_layout: str) -> Tensor:
        """One statistic per row and head, [B, N, S, 8] or [T, N, 8], every number eight times.

        With TND the shape says [T, N, 8], but unless softmax_layout is "TND" the numbers lie sequence by sequence, each
        as [N, S_i]: indexing such a tensor by token reads another head's number.
        """
        if self.layout != "TND":
            whole = blocks[0]
        elif softmax_layout == "TND":
            whole = torch.cat([block[0].T for block in blocks])
        else:
            whole = torch.cat([block.flatten() for block in blocks]).view(-1, self.query_heads)
        return whole[..., None].repeat_interleave(REPEATS, -1)

    def cut_statistics(self, statistic: Tensor, softmax_layout: str) -> list[Tensor]:
        """Blocks [B, N, S] of a statistic; the inverse of `join_statistics`."""
        whole = statistic[..., 0]
        if self.layout != "TND":
            return [whole]
        return cut_tnd_statistics(whole, self.query_ends, softmax_layout)


def cut_tnd_statistics(whole_TN: Tensor, ends: Sequence[int], softmax_layout: str) -> list[Tensor]:
    """Blocks [1, N, S_i] of a statistic whose shape is [T, N]."""
    if softmax_layout == "TND":
        return [whole_TN[first:last].T[None] for first, last in pairwise([0, *ends])]
    heads, flat = whole_TN.size(1), whole_TN.flatten()
    return [flat[first * heads : last * heads].view(1, heads, last - first) for first, last in pairwise([0, *ends])]


def cut(x: Tensor, layout: str, heads: int, ends: Sequence[int]) -> list[Tensor]:
    """Blocks [B, N, S, D]."""
    if layout == "TND":
        return [x[first:last].transpose(0, 1)[None] for first, last in pairwise([0, *ends])]
    if layout == "SBH":
        return [x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)]
    if layout == "BSH":
        return [x.unflatten(-1, (heads, -1)).transpose(1, 2)]
    return [x.transpose(1, 2) if layout == "BSND" else x]


def sequence_ends(lengths: Sequence[int] | None) -> tuple[int, ...]:
    """Cumulative ends without leading zero; zeros behind the last sequence stand for batches that are left out."""
    ends = list(lengths or ())
    while len(ends) > 1 and ends[-1] == 0 and any(ends):
        ends.pop()
    return tuple(ends)


def key_heads(call: Call) -> int:
    """Number of key and value heads."""
    axis = {"BNSD": 1, "BSND": 2, "TND": 1}.get(call.input_layout)
    return call.key.size(-1) // head_dim(call) if axis is None else call.key.size(axis)


def head_dim(call: Call) -> int:
    """D of queries and keys."""
    width: int = call.query.size(-1)
    return width // call.head_num if call.input_layout in ("BSH", "SBH") else width

"""Ring attention: keys and values travel from rank to rank, queries stay (Liu et al., arXiv 2310.01889).

    step     0      1      2      3            ring rank r sees the keys of ring rank s = r - step, mod R
    rank 0   k0     k3     k2     k1           s = r   the diagonal: causal
    rank 1   k1     k0     k3     k2           s < r   all queries, the first chunk of each document's keys
    rank 2   k2     k1     k0     k3           s > r   the second chunk of each document's queries, all keys
    rank 3   k3     k2     k1     k0

That is what a causal mask leaves of two zigzag parts (`glmv.parallel.sequence`): every block is square and causal, or
whole, and all steps but the first cost the same on every rank. While a block is computed, the next keys are under way.

Blocks are put together by their log-sum-exp in fp32 (float64 in float64), and rounded once. The backward pass goes
round again: each block's gradients follow from the output and log-sum-exp over all keys, and what a rank finds for
others' keys travels on with them, in fp32, until it comes home.

A rank holds, besides its own queries, keys, values and output, at most: forward one fp32 output, its log-sum-exp
and two blocks of keys and values (the one at work and the one that arrives); backward one fp32 gradient of the queries,
two blocks of keys and values and three fp32 blocks of their gradients (at work, leaving, arriving); and what one kernel
call gives, forward two more of its size to merge it. Nothing grows with S x S, or with the number of ranks.

A rank sends, per layer, with C places, B rows and N' key-value heads of D channels

    forward     (R - 1) x 2 x B x N' x C x D x element
    backward    the same, and R x 2 x B x N' x C x D x 4 for the gradients (8 in float64)
"""
# Shapes: B batch, N query or key-value heads, C places of this ring rank, D head dim; a run has n documents of two
# chunks of c places each, so that its shape is [B n, N, 2, c, D]. X elements of all runs, flat.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from glmv.ops.attention_block import attend_block, attend_block_backward, merge
from glmv.ops.precision import at_least_fp32
from glmv.parallel.dispatch import Traffic

KEYS, GRADIENTS = 0, 1  # tags: both kinds may be under way between the same two ranks


@dataclass
class Moving:
    """A tensor that arrives while its predecessor leaves; the one that leaves is kept alive until then."""

    arriving: Tensor
    leaving: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """What has arrived."""
        for work in self.works:
            work.wait()
        return self.arriving


class Ring:
    """Ranks in a circle: each sends to the next and receives from the one before.

    Attributes:
        traffic: what this rank has sent.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.rank = group.rank()
        self.traffic = Traffic()

    def pass_on(self, leaving: Tensor, tag: int) -> Moving:
        """Start to send `leaving` to the next rank, and to receive its like from the one before."""
        arriving = torch.empty_like(leaving)
        there, here = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        operations = [
            dist.P2POp(dist.isend, leaving, group=self.group, tag=tag, group_peer=there),
            dist.P2POp(dist.irecv, arriving, group=self.group, tag=tag, group_peer=here),
        ]
        self.traffic.bytes += leaving.numel() * leaving.element_size()
        return Moving(arriving, leaving, dist.batch_isend_irecv(operations))

    def source(self, step: int) -> int:
        """Whose keys are here in this step."""
        return (self.rank - step) % self.size

    def attend(
        self, query_BNCD: Tensor, key_BNCD: Tensor, value_BNCD: Tensor, documents: Sequence[int], *, implementation: str
    ) -> Tensor:
        """Collective: causal attention inside each document, [B, N, C, D].

        Args:
            key_BNCD, value_BNCD: may have fewer heads, each for several neighbouring query heads.
            documents: places of each document on a ring rank, two chunks each; they sum to C.
        """
        return _RingAttention.apply(query_BNCD, key_BNCD, value_BNCD, self, tuple(documents), implementation)


class Run(NamedTuple):
    """Neighbouring documents of the same length, which share one kernel call: the first place, how many, chunk."""

    start: int
    documents: int
    chunk: int

    @property
    def places(self) -> slice:
        """All of their places."""
        return slice(self.start, self.start + self.documents * 2 * self.chunk)

    def cut(self, states_BNCD: Tensor) -> Tensor:
        """[B, N, C, D] -> [B n, N, 2, c, D]."""
        pieces = states_BNCD[:, :, self.places].unflatten(2, (self.documents, 2, self.chunk))
        return pieces.transpose(1, 2).flatten(0, 1)

    def put(self, pieces: Tensor, states_BNCD: Tensor) -> None:
        """Undo `cut`, into its part of `states_BNCD`."""
        whole = pieces.unflatten(0, (-1, self.documents)).transpose(1, 2)
        states_BNCD[:, :, self.places] = whole.flatten(2, 4)


def runs_of(documents: Sequence[int]) -> list[Run]:
    """Documents of neighbouring equal lengths together."""
    found, start = [], 0
    for length, same in groupby(documents):
        count = len(list(same))
        found.append(Run(start, count, length // 2))
        start += count * length
    return found


def _pack(runs: Sequence[Run], key_BNCD: Tensor, value_BNCD: Tensor) -> Tensor:
    """Keys and values of all runs in one flat tensor, which travels as one message."""
    return torch.cat([run.cut(states).flatten() for run in runs for states in (key_BNCD, value_BNCD)])


def _unpack(flat_X: Tensor, like: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Views of keys and values, run by run, of the shapes of `like` (keys)."""
    sizes = [keys.numel() for keys in like for _ in range(2)]
    parts = iter(flat_X.split(sizes))
    return [(next(parts).view_as(keys), next(parts).view_as(keys)) for keys in like]


@dataclass(frozen=True)
class _Block:
    """Which chunks of queries meet which chunks of keys in a step; 2 chunks or 1 of each."""

    queries: slice
    keys: slice
    causal: bool

    @classmethod
    def of(cls, rank: int, source: int) -> _Block:
        if source == rank:
            return cls(slice(0, 2), slice(0, 2), causal=True)
        if source < rank:
            return cls(slice(0, 2), slice(0, 1), causal=False)
        return cls(slice(1, 2), slice(0, 2), causal=False)


def _joined(states: Tensor) -> Tensor:
    """[.., chunks, c, D] -> [.., S, D]."""
    return states.flatten(2, 3)


class _Context(FunctionCtx):
    """What the backward pass of `_RingAttention` needs."""

    saved_tensors: tuple[Tensor, ...]
    ring: Ring
    runs: list[Run]
    implementation: str


class _RingAttention(torch.autograd.Function):
    """Forward and backward, both once round the ring."""

    @staticmethod
    def forward(
        ctx: _Context,
        query_BNCD: Tensor,
        key_BNCD: Tensor,
        value_BNCD: Tensor,
        ring: Ring,
        documents: tuple[int, ...],
        implementation: str,
    ) -> Tensor:
        runs = runs_of(documents)
        queries, keys = ([run.cut(states) for run in runs] for states in (query_BNCD, key_BNCD))
        # No name for what travels, here or below: it would be kept until the last step.
        outputs, lses = _forward(ring, queries, _pack(runs, key_BNCD, value_BNCD), keys, implementation)
        output_BNCD = torch.empty_like(query_BNCD)
        for run, output in zip(runs, outputs, strict=True):
            run.put(output.to(query_BNCD.dtype), output_BNCD)
        ctx.save_for_backward(query_BNCD, key_BNCD, value_BNCD, output_BNCD, *lses)
        ctx.ring, ctx.runs, ctx.implementation = ring, runs, implementation
        return output_BNCD

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_BNCD, key_BNCD, value_BNCD, output_BNCD, *lses = ctx.saved_tensors
        ring, runs, grad_BNCD = ctx.ring, ctx.runs, grads[0].contiguous()
        at_home = [
            _AtHome(run.cut(grad_BNCD), run.cut(query_BNCD), run.cut(output_BNCD), lse)
            for run, lse in zip(runs, lses, strict=True)
        ]
        keys = [run.cut(key_BNCD) for run in runs]
        query_grads, flat_X = _backward(ring, at_home, _pack(runs, key_BNCD, value_BNCD), keys, ctx.implementation)
        found = tuple(torch.empty_like(states) for states in (query_BNCD, key_BNCD, value_BNCD))
        for run, query_grad, pair in zip(runs, query_grads, _unpack(flat_X, keys), strict=True):
            for pieces, whole in zip((query_grad, *pair), found, strict=True):
                run.put(pieces.to(whole.dtype), whole)
        return *found, None, None, None


def _forward(
    ring: Ring, queries: list[Tensor], flat_X: Tensor, like: list[Tensor], implementation: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs [B n, N, 2, c, D] and log-sum-exps [B n, N, 2, c] of all runs, in the wide dtype."""
    wide = at_least_fp32(flat_X.dtype)
    outputs = [torch.zeros_like(query, dtype=wide) for query in queries]
    lses = [output.new_full(output.shape[:-1], float("-inf")) for output in outputs]
    for step in range(ring.size):
        moving = ring.pass_on(flat_X, KEYS) if step + 1 < ring.size else None
        block = _Block.of(ring.rank, ring.source(step))
        _attend(block, queries, _unpack(flat_X, like), outputs, lses, implementation)
        if moving is not None:
            flat_X = moving.wait()
    return outputs, lses


def _attend(
    block: _Block,
    queries: list[Tensor],
    states: list[tuple[Tensor, Tensor]],
    outputs: list[Tensor],
    lses: list[Tensor],
    implementation: str,
) -> None:
    """Take one block of keys and values into the outputs and log-sum-exps of all runs, in place."""
    for query, output, lse, (key, value) in zip(queries, outputs, lses, states, strict=True):
        more, more_lse = attend_block(
            _joined(query[:, :, block.queries]),
            _joined(key[:, :, block.keys]),
            _joined(value[:, :, block.keys]),
            causal=block.causal,
            implementation=implementation,
        )
        seen, seen_lse = output[:, :, block.queries], lse[:, :, block.queries]
        merged, merged_lse = merge(seen, seen_lse, more.to(seen.dtype).view_as(seen), more_lse.reshape(seen_lse.shape))
        seen.copy_(merged)
        seen_lse.copy_(merged_lse)


class _AtHome(NamedTuple):
    """What of a run stays on its rank in the backward pass."""

    grad: Tensor
    query: Tensor
    output: Tensor
    lse: Tensor


def _backward(
    ring: Ring, at_home: list[_AtHome], flat_X: Tensor, like: list[Tensor], implementation: str
) -> tuple[list[Tensor], Tensor]:
    """Gradients of the queries of all runs, and of this rank's keys and values, flat; in the wide dtype."""
    wide = at_least_fp32(flat_X.dtype)
    query_grads = [torch.zeros_like(run.query, dtype=wide) for run in at_home]
    returning: Moving | None = None
    for step in range(ring.size):
        moving = ring.pass_on(flat_X, KEYS) if step + 1 < ring.size else None
        block = _Block.of(ring.rank, ring.source(step))
        here_X = torch.zeros_like(flat_X, dtype=wide)
        _find_gradients(block, at_home, query_grads, _unpack(flat_X, like), _unpack(here_X, like), implementation)
        # What the ranks before have found for these keys has been under way meanwhile.
        here_X = here_X if returning is None else here_X.add_(returning.wait())
        returning = ring.pass_on(here_X, GRADIENTS)
        if moving is not None:
            flat_X = moving.wait()
    assert returning is not None, "a ring has at least one rank"
    return query_grads, returning.wait()


def _find_gradients(
    block: _Block,
    at_home: list[_AtHome],
    query_grads: list[Tensor],
    states: list[tuple[Tensor, Tensor]],
    grads: list[tuple[Tensor, Tensor]],
    implementation: str,
) -> None:
    """Add one block's gradients of queries, keys and values of all runs, in place."""
    for run, query_grad, pair, pair_grads in zip(at_home, query_grads, states, grads, strict=True):
        found = attend_block_backward(
            *(_joined(part[:, :, block.queries]) for part in (run.grad, run.query)),
            *(_joined(part[:, :, block.keys]) for part in pair),
            _joined(run.output[:, :, block.queries]),
            run.lse[:, :, block.queries].flatten(2),
            causal=block.causal,
            implementation=implementation,
        )
        query_part = query_grad[:, :, block.queries]
        query_part += found[0].reshape(query_part.shape)
        for grad, more in zip(pair_grads, found[1:], strict=True):
            part = grad[:, :, block.keys]
            part += more.reshape(part.shape)

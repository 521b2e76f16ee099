"""Ulysses attention: ranks exchange parts of the sequence for parts of the heads (Jacobs et al., arXiv 2309.14509).

    rank 0   tokens 0 1, heads a b c d                 tokens 0 1 2 3, heads a b
    rank 1   tokens 2 3, heads a b c d      and back   tokens 2 3 0 1, heads c d      (in order: 0 1 2 3)

Between the two exchanges each rank attends over the whole sequence with its own heads, by any kernel. With fewer
key-value heads than ranks, or a number that the ranks do not divide, each is repeated until they do; the gradients of
the copies are summed where the head came from.

A rank sends, per layer, with B rows of L places, N query and N' key-value heads (as repeated) of D channels on U ranks

    (U - 1) / U x (2 N + 2 N') x B x L x D x element        forward, and the same backward
"""
# Shapes: B batch, N heads, L places of this rank, C = U L places of all ranks, D head dim, U ranks.

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from glmv.parallel.dispatch import Traffic


class Ulysses:
    """The exchange between the ranks of a group.

    Attributes:
        traffic: what this rank has sent.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.traffic = Traffic()

    def to_heads(self, query_BNLD: Tensor, key_BNLD: Tensor, value_BNLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Collective: the whole sequence [B, N / U, C, D] of this rank's heads; keys and values may have fewer."""
        query_BNLD, key_BNLD = query_BNLD.to(value_BNLD.dtype), key_BNLD.to(value_BNLD.dtype)
        states = query_BNLD, self.repeated(key_BNLD), self.repeated(value_BNLD)
        parts = [part.unflatten(1, (self.size, -1)).movedim(1, 0) for part in states]
        # One message: of each rank's share the query's heads, then the key's, then the value's.
        arrived_UBNLD = self._exchange(torch.cat(parts, dim=2))
        whole_BNCD = arrived_UBNLD.movedim(0, 2).flatten(2, 3)
        query, key, value = whole_BNCD.split([part.shape[2] for part in parts], dim=1)
        return query, key, value

    def to_sequence(self, output_BNCD: Tensor) -> Tensor:
        """Collective: this rank's places [B, N, L, D] of all heads."""
        parts_UBNLD = output_BNCD.unflatten(2, (self.size, -1)).movedim(2, 0)
        return self._exchange(parts_UBNLD).movedim(0, 1).flatten(1, 2)

    def repeated(self, states_BNLD: Tensor) -> Tensor:
        """Each key or value head so often that the ranks divide their number."""
        heads = states_BNLD.shape[1]
        return states_BNLD.repeat_interleave(math.lcm(heads, self.size) // heads, dim=1)

    def _exchange(self, parts_UBNLD: Tensor) -> Tensor:
        return _Exchange.apply(parts_UBNLD, self)

    def send(self, parts_U: Tensor) -> Tensor:
        """Collective: part u goes to rank u; from each the part that it had for this one. Without autograd."""
        parts_U = parts_U.contiguous()
        arrived_U = torch.empty_like(parts_U)
        dist.all_to_all_single(arrived_U, parts_U, group=self.group)
        self.traffic.bytes += (self.size - 1) * parts_U[0].numel() * parts_U.element_size()
        return arrived_U


class _Context(FunctionCtx):
    """What the backward pass of `_Exchange` needs."""

    ulysses: Ulysses


class _Exchange(torch.autograd.Function):
    """Parts of one size: the gradients go the same way back."""

    @staticmethod
    def forward(ctx: _Context, parts_U: Tensor, ulysses: Ulysses) -> Tensor:
        ctx.ulysses = ulysses
        return ulysses.send(parts_U)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.ulysses.send(grads[0]), None


def head_fault(heads: int, ulysses: int, key: str) -> str | None:
    """Why so many ranks cannot share these query heads; None if they can."""
    if heads % ulysses == 0:
        return None
    *others, last = [str(n) for n in range(1, heads + 1) if heads % n == 0]
    choice = f"{', '.join(others)} or {last}" if others else last
    return (
        f"{key} = {ulysses} does not divide the {heads} query heads of the text decoder.\n"
        f"Choose {choice}, and spread a sequence further by ring_attention_size."
    )

"""Experts one by one, as the hub stores them, and stacked, as the model holds them.

    hub                                                             stacked
    experts.<e>.gate_proj.weight [I, H], .up_proj.weight [I, H]     experts.gate_up_proj [E, H, 2I], [e] = gate^T | up^T
    experts.<e>.down_proj.weight [H, I]                             experts.down_proj [E, I, H], [e] = down^T

Both directions go through one function, `hub_view`, so each is the other's exact inverse.
"""
# Shapes: E routed experts, H hidden, I moe intermediate.

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from glmv.checkpoint.ahead import run_ahead

EXPERT_LAYOUT = "E,H,2I"
_EXPERT = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj\.weight")
_ROWS_AT_ONCE = 16  # of a transposed copy: whole matrices at once miss the cache at every element


class Slot(NamedTuple):
    """Where one hub tensor stands in a stacked one."""

    key: str
    expert: int
    part: str


def expert_slot(name: str) -> Slot | None:
    """Find the slot of a hub tensor; None for tensors that are stored as they are."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    stacked = "down_proj" if match["part"] == "down" else "gate_up_proj"
    return Slot(f"{match['experts']}.{stacked}", int(match["index"]), match["part"])


def stored_key(name: str) -> str:
    """Name under which the model holds a hub tensor: of the stacked tensor for an expert's, its own for others."""
    slot = expert_slot(name)
    return slot.key if slot else name


def stacked_shape(part: str, hub_shape: Sequence[int], experts: int) -> tuple[int, int, int]:
    """Shape of the stacked tensor of `experts` hub matrices."""
    rows, columns = hub_shape
    return (experts, columns, rows) if part == "down" else (experts, columns, 2 * rows)


def hub_view(stacked: torch.Tensor, slot: Slot) -> torch.Tensor:
    """View one expert's matrix in the hub's orientation (not contiguous, sharing memory)."""
    matrix = stacked[slot.expert]
    if slot.part == "down":
        return matrix.T
    gate_HI, up_HI = matrix.chunk(2, dim=1)
    return (gate_HI if slot.part == "gate" else up_HI).T


def copy_transposed(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into `target` (same shape, same dtype, opposite memory order), bit by bit."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[source.element_size()]
    if source.stride(-1) != 1:
        target, source = target.T, source.T
    into, outof = target.view(bits).numpy(), source.view(bits).numpy()
    for row in range(0, len(outof), _ROWS_AT_ONCE):
        into[row : row + _ROWS_AT_ONCE] = outof[row : row + _ROWS_AT_ONCE]


def stack(
    shape: Sequence[int], dtype: torch.dtype, parts: Iterable[tuple[Slot, Callable[[], torch.Tensor]]]
) -> torch.Tensor:
    """Stack hub matrices, in any order, each read when its turn comes.

    Args:
        shape: of the stacked tensor (`stacked_shape`).
        parts: every slot of the tensor, and what reads its matrix.
    """
    stacked = torch.empty(shape, dtype=dtype)

    def place(slot: Slot, read: Callable[[], torch.Tensor]) -> None:
        copy_transposed(hub_view(stacked, slot), read())

    for _ in run_ahead(partial(place, slot, read) for slot, read in parts):
        continue
    return stacked


def split(stacked: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Cut one expert's matrix out: contiguous, in the hub's orientation, with memory of its own."""
    view = hub_view(stacked, slot)
    matrix = torch.empty(view.shape, dtype=view.dtype)
    copy_transposed(matrix, view)
    return matrix

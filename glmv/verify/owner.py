"""Who holds an element of a published tensor, for the reader of a miss."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from spec.partition import coordinate, holder

EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(\w+)\.weight$")


@dataclass(frozen=True)
class Layout:
    """How a run is spread over its ranks.

    Attributes:
        ranks: how many.   shards: ranks that share one copy of all but experts.
        ep, efsdp: expert-parallel ranks, and ranks that shard one's experts; copies (`edp`) fill the rest.
    """

    ranks: int
    shards: int
    ep: int
    efsdp: int

    @classmethod
    def plain(cls, ranks: int) -> Layout:
        """All parameters sharded over all ranks."""
        return cls(ranks, shards=ranks, ep=1, efsdp=ranks)

    def __str__(self) -> str:
        copies = f"{self.ranks // self.shards} x " if self.shards < self.ranks else ""
        experts = f", ep {self.ep} x efsdp {self.efsdp}" if self.ep > 1 else ""
        return f"fsdp {copies}{self.shards}{experts}"


def owner(name: str, where: str, shapes: Mapping[str, torch.Size], layout: Layout) -> str:
    """`held by rank 2 (ep 0, efsdp 1)`, or "" if nobody can say.

    Args:
        name: published name.   where: index of the element such as "[3, 17]".   shapes: of all published tensors.
    """
    index = [int(i) for i in re.findall(r"\d+", where)] if where.startswith("[") else []
    expert = EXPERT.search(name)
    if name not in shapes or not (index or expert):
        return ""
    held = _expert_axes(expert, index, shapes, layout) if expert else {}
    if not held:
        held = {"dp_shard": holder(index[0], shapes[name][0], layout.shards)}
    axes = {"dp_replicate": layout.ranks // layout.shards, "dp_shard": layout.shards}
    if "dp_shard" not in held:
        axes = {"edp": layout.ranks // (layout.ep * layout.efsdp), "efsdp": layout.efsdp, "ep": layout.ep}
    places = [dict(zip(axes, coordinate(rank, [*axes.values()]), strict=True)) for rank in range(layout.ranks)]
    ranks = [rank for rank, place in enumerate(places) if held.items() <= place.items()]
    label = "rank" if len(ranks) == 1 else "ranks"
    return f"held by {label} {', '.join(map(str, ranks))} ({', '.join(f'{a} {at}' for a, at in held.items())})"


def _expert_axes(
    expert: re.Match[str], index: list[int], shapes: Mapping[str, torch.Size], layout: Layout
) -> dict[str, int]:
    """Position on each axis that shards an expert's weight."""
    prefix, number, part = expert[1], int(expert[2]), expert[3]
    count = sum(other.startswith(prefix) and other.endswith(f".{part}.weight") for other in shapes)
    if layout.ep == 1:
        axis = "dp_shard" if layout.efsdp == layout.shards else "efsdp"
        return {axis: holder(number, count, layout.efsdp)}
    held = {"ep": holder(number, count, layout.ep)}
    if index and layout.efsdp > 1:
        # The machine stores the transpose and shards the first size that can be: here the columns, if they can.
        rows, columns = shapes[expert[0]]
        dim, size = (1, columns) if columns % layout.efsdp == 0 else (0, rows)
        held["efsdp"] = holder(index[dim], size, layout.efsdp)
    return held

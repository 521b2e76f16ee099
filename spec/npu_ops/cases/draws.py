"""Drawing small numbers, choices and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from spec.npu_ops.refuse import FLOATS

Item = TypeVar("Item")


@dataclass(frozen=True)
class Case:
    """The arguments of one call, and what is special about them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    label: str = "drawn"

    def labelled(self, label: str) -> Case:
        """The same call under a name."""
        return replace(self, label=label)


@dataclass(frozen=True)
class Draw:
    """A source of arguments; the same generator state gives the same ones."""

    generator: torch.Generator

    @classmethod
    def seeded(cls, seed: int) -> Draw:
        """A source with a fixed seed."""
        return cls(torch.Generator().manual_seed(seed))

    def integer(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def choice(self, items: Sequence[Item]) -> Item:
        """One of the items."""
        return items[self.integer(0, len(items) - 1)]

    def flag(self) -> bool:
        """True or False."""
        return bool(self.integer(0, 1))

    def dtype(self) -> torch.dtype:
        """One of the dtypes that the device computes in."""
        return self.choice(FLOATS)

    def sizes(self, count: int, low: int, high: int) -> list[int]:
        """Sizes that differ pairwise, so that no two dims can be confused."""
        return (torch.randperm(high - low + 1, generator=self.generator)[:count] + low).tolist()

    def split(self, total: int, parts: int) -> list[int]:
        """`parts` counts, some of them zero, that add up to total."""
        edges = sorted(self.integer(0, total) for _ in range(parts - 1))
        return [last - first for first, last in zip([0, *edges], [*edges, total], strict=True)]

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal numbers, contiguous."""
        return torch.randn(shape, generator=self.generator).to(dtype)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal numbers; often a slice of a wider tensor, and so not contiguous."""
        if not shape or self.flag():
            return self.normal(*shape, dtype=dtype)
        return self.normal(*shape[:-1], shape[-1] + self.integer(1, 3), dtype=dtype)[..., : shape[-1]]

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Whole numbers below high."""
        return torch.randint(high, shape, generator=self.generator, dtype=dtype)

"""Weights below one module, read by the rest of their published name; and a record of what each module returned."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class Scope:
    """`Scope(weights)["lm_head.weight"]`; `scope / "self_attn"` steps into a sub-module."""

    def __init__(
        self, weights: Mapping[str, Tensor], prefix: str = "", record: dict[str, Tensor] | None = None
    ) -> None:
        self.weights, self.prefix, self.record = weights, prefix, record

    def __truediv__(self, name: str | int) -> Scope:
        return Scope(self.weights, f"{self.prefix}{name}.", self.record)

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[self.prefix + name]

    def get(self, name: str) -> Tensor | None:
        """The weight, or None where the model has none (projections without bias)."""
        return self.weights.get(self.prefix + name)

    def told(self, output: Tensor) -> Tensor:
        """`output`, written down as what this module returned, if anybody asked for a record."""
        if self.record is not None:
            self.record[self.prefix.removesuffix(".")] = output.detach()
        return output

"""Weights below one module, read by the rest of their published name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class Scope:
    """`Scope(weights)["lm_head.weight"]`; `scope / "self_attn"` steps into a sub-module."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str = "") -> None:
        self.weights, self.prefix = weights, prefix

    def __truediv__(self, name: str | int) -> Scope:
        return Scope(self.weights, f"{self.prefix}{name}.")

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[self.prefix + name]

    def get(self, name: str) -> Tensor | None:
        """The weight, or None where the model has none (projections without bias)."""
        return self.weights.get(self.prefix + name)

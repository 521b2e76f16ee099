"""Calls and results without their values: what a meta kernel sees, and what it answers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def on_device(value: Any, device: str) -> Any:  # noqa: ANN401
    """The same nested arguments, every tensor in them replaced by an empty one of its shape, strides and dtype."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if isinstance(value, list | tuple):
        return type(value)(on_device(item, device) for item in value)
    return value


def described(value: Any) -> Any:  # noqa: ANN401
    """A nested result as text: shape and dtype of each tensor, the type of everything else."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    return type(value).__name__

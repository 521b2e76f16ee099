"""Inputs of operators."""

import torch
from torch import Tensor

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Random float64 numbers that bf16 can hold, so that every dtype starts from the same ones."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().double()


def leaf(x: Tensor, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A copy of `x` in `dtype` that collects a gradient."""
    return x.detach().clone().to(dtype).to(device).requires_grad_()

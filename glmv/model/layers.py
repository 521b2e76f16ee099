"""Small modules that every part of the model is made of. Each is created as uninitialised memory.

Weights always come from a checkpoint: drawing random ones first would cost minutes for 106B parameters, and a strict
load fails on any that is missing.
"""
# Shapes: H hidden, I intermediate.

from collections.abc import Callable

import torch
from torch import Tensor, nn

from glmv.ops.kernels import Kernels
from glmv.ops.norm import rms_norm
from glmv.ops.swiglu import swiglu


class Linear(nn.Linear):
    """`nn.Linear` without random initialisation."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are; see the module docstring."""


class Embedding(nn.Embedding):
    """`nn.Embedding` without random initialisation."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are; see the module docstring."""


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` without initialisation."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are; see the module docstring."""


class RMSNorm(nn.Module):
    """RMSNorm with a scale: see `glmv.ops.norm.rms_norm` for its rounding points."""

    def __init__(self, hidden_size: int, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise [..., H]."""
        return rms_norm(hidden, self.weight, self.eps, kernels=self.kernels)


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, no biases."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(swiglu(self.gate_proj(hidden), self.up_proj(hidden)))


class KeepsFloat32(nn.Module):
    """A module whose own tensors never become narrower than fp32, whatever `.to(dtype)` the model around it gets.

    Rounding RoPE frequencies or `e_score_correction_bias` to bf16 changes positions and expert choices silently.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KeepsFloat32":
        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrower = tensor.is_floating_point() and moved.dtype.itemsize < torch.float32.itemsize
            return tensor.to(moved.device) if narrower else moved

        return super()._apply(keep, recurse)

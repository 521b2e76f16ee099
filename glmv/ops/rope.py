"""Rotary position embedding: frequencies, and the half-split rotation (pair i with i + D/2), whole or partial."""

import torch
from torch import Tensor

from glmv.ops.kernels import Kernels
from glmv.ops.registry import Operator

rotate: Operator[..., Tensor] = Operator("rotate")


def inverse_frequencies(theta: float, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`theta^(-2i/dim)` for i < dim/2, on the CPU.

    Always the CPU: a device's own `pow` may differ in the last bit, and every rank must hold the same buffer.
    """
    exponents = torch.arange(0, dim, 2, dtype=dtype, device="cpu") / dim
    return 1.0 / (theta**exponents)


@rotate.register("torch", when=lambda *args, kernels: True)
def rotate_torch(states: Tensor, cos: Tensor, sin: Tensor, *, kernels: Kernels) -> Tensor:
    """Rotate the first `cos.shape[-1]` channels of `states` [..., D]; the rest pass through.

    cos and sin broadcast against the leading dims and hold each angle twice ([f, f]); dtype of all three is the same.
    """
    rotary_dim = cos.shape[-1]
    rotated, passed = states[..., :rotary_dim], states[..., rotary_dim:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([rotated, passed], dim=-1)

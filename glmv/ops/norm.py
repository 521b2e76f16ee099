"""Root mean square normalisation."""

import torch
from torch import Tensor

from glmv.ops.kernels import Kernels
from glmv.ops.precision import at_least_fp32
from glmv.ops.registry import Operator

rms_norm: Operator[..., Tensor] = Operator("rms_norm")


@rms_norm.register("torch", when=lambda *args, kernels: True)
def rms_norm_torch(hidden: Tensor, weight_H: Tensor, eps: float, *, kernels: Kernels) -> Tensor:
    """`weight * (hidden / rms(hidden))`: the quotient in fp32, rounded to hidden's dtype BEFORE the weight multiplies.

    Args:
        hidden: [..., H], any float dtype.
        weight_H: scale, in the compute dtype.
        eps: added to the mean of squares.
    """
    wide = hidden.to(at_least_fp32(hidden.dtype))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight_H * wide.to(hidden.dtype)

"""Rotary position embedding by npu_rotary_mul."""
# Shapes: B batch, N heads, S sequence, D head dim, R <= D channels that turn.

import torch
from torch import Tensor

from glmv.ops.kernels import Kernels
from glmv.ops.npu.library import fits, on_npu, torch_npu, why_not_dtype
from glmv.ops.rope import rotate

MAX_CHANNELS = 894
MAX_ROWS = 999  # of B and of N


def can_rotate(states: Tensor, cos: Tensor, sin: Tensor, *, kernels: Kernels) -> bool:
    """Whether the fused rotation was asked for and takes these tensors."""
    if not (on_npu(states) and kernels.fused):
        return False
    why = why_not_dtype(states, cos)
    rows = max(states.shape[-2 if states.dim() == 3 else 1], 1 if states.dim() == 3 else states.shape[0])
    if rows > MAX_ROWS or cos.shape[-1] > MAX_CHANNELS:
        why = why or f"no kernel for states of {tuple(states.shape)}"
    return fits("npu_rotary_mul", why)


@rotate.register("npu", when=can_rotate)
def rotate_npu(states: Tensor, cos: Tensor, sin: Tensor, *, kernels: Kernels) -> Tensor:
    """Rotate the first R channels; fp32 inside, rounded once, to the wider dtype of states and angles.

    Args:
        states: [B, N, S, D] with angles [B, 1, S, R], or [S, N, D] with angles [S, 1, R].
    """
    # The kernel rounds cos and sin to the dtype of the states, unasked: wide angles need wide states.
    wide = torch.promote_types(states.dtype, cos.dtype)
    states, cos, sin = states.to(wide), cos.to(wide), sin.to(wide)
    if states.dim() == 3:  # as BSND with one row of angles: 4-D leaves no doubt which axis is which
        return _rotate(states[None], cos[None], sin[None])[0]
    return _rotate(states, cos, sin)


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    turned = torch_npu().npu_rotary_mul(states[..., :width], cos, sin, rotary_mode="half")
    return turned if width == states.shape[-1] else torch.cat([turned, states[..., width:]], dim=-1)

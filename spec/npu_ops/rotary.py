"""Rotary position embedding of a whole tensor (RoFormer, arXiv 2104.09864).

Source: op-plugin's documentation of npu_rotary_mul and the checks of aclnnRotaryPositionEmbedding (Atlas A2 and A3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec.npu_ops.contract import Call, Contract, wide
from spec.npu_ops.refuse import check_dtype, refuse_if, refuse_undescribed

# Which leading dims of cos and sin may be 1 where x is larger: "1" or "x" (as in x), by number of leading dims.
# half: 11SD B1SD BNSD, 1S1D BS1D BSND, S11D SB1D SBND, and T1D TND; interleave: 11SD 1S1D S11D and T1D.
SHAPES = {
    "half": {3: ["11x", "x1x", "xxx", "1x1", "xx1", "x11"], 2: ["x1", "xx"]},
    "interleave": {3: ["11x", "1x1", "x11"], 2: ["x1"]},
}
WIDEST_HEAD = 896


def rotary_mul(
    input: Tensor,
    r1: Tensor,
    r2: Tensor,
    rotary_mode: str = "half",
    rotate: Tensor | None = None,
) -> Tensor:
    """x * cos + turn(x) * sin, in float32, rounded once.

    cos and sin are rounded to the dtype of x BEFORE they are used: float32 tables do not help bfloat16 rows.

    Args:
        input: x, [T, N, D] or 4-D with D last.
        r1, r2: cos and sin, broadcast over dims that are 1.
        rotary_mode: "half" turns i against i + D/2, "interleave" 2i against 2i + 1.
    """
    dtype = wide(input)
    x, cos, sin = input.to(dtype), r1.to(input.dtype).to(dtype), r2.to(input.dtype).to(dtype)
    return (x * cos + turn(x, rotary_mode) * sin).to(input.dtype)


def turn(x: Tensor, mode: str) -> Tensor:
    """Every pair (a, b) as (-b, a)."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def rotary_mul_backward(
    grad: Tensor,
    input: Tensor,
    r1: Tensor,
    r2: Tensor,
    rotary_mode: str = "half",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, cos and sin, all in the dtype of x; those of cos and sin are summed over broadcast dims.

    turn is antisymmetric, so that its transpose is -turn.
    """
    dtype = wide(input)
    x, cos, sin = input.to(dtype), r1.to(input.dtype).to(dtype), r2.to(input.dtype).to(dtype)
    grad = grad.to(dtype)
    to_x = grad * cos - turn(grad * sin, rotary_mode)
    to_cos, to_sin = (grad * x).sum_to_size(r1.shape), (grad * turn(x, rotary_mode)).sum_to_size(r2.shape)
    return to_x.to(input.dtype), to_cos.to(input.dtype), to_sin.to(input.dtype)


def refuse_rotary_mul(call: Call) -> None:
    """What npu_rotary_mul refuses."""
    refuse_undescribed("npu_rotary_mul", rotate=call.rotate)
    refuse_rotary_shapes(call)


def refuse_rotary_mul_backward(call: Call) -> None:
    """What npu_rotary_mul_backward refuses."""
    refuse_rotary_shapes(call)
    refuse_if(call.grad.shape != call.input.shape, "npu_rotary_mul_backward: grad must have the shape of input")


def refuse_rotary_shapes(call: Call) -> None:
    """A mode, dtype or shape without a kernel."""
    mode, x, cos, sin = call.rotary_mode, call.input, call.r1, call.r2
    refuse_if(mode not in SHAPES, f"The rotary_mode of npu_rotary_mul should be half or interleave, but got {mode}.")
    check_dtype("x", x)
    check_dtype("cos", cos)
    check_dtype("sin", sin)
    refuse_if(x.dim() not in (3, 4), f"npu_rotary_mul: x must have 3 or 4 dims, but has {x.dim()}")
    width = x.size(-1)
    refuse_if(
        width % 2 != 0 or width >= WIDEST_HEAD, f"npu_rotary_mul: D = {width} must be even and below {WIDEST_HEAD}"
    )
    refuse_if(cos.shape != sin.shape, f"npu_rotary_mul: cos is {tuple(cos.shape)} but sin is {tuple(sin.shape)}")
    fits = cos.dim() == x.dim() and cos.size(-1) == width and any(fit(p, x, cos) for p in SHAPES[mode][x.dim() - 1])
    refuse_if(not fits, f"npu_rotary_mul: cos {tuple(cos.shape)} does not fit x {tuple(x.shape)} in mode {mode}")


def fit(pattern: str, x: Tensor, cos: Tensor) -> bool:
    """Whether the leading dims of cos follow the pattern."""
    return all(have == (1 if kind == "1" else want) for kind, want, have in zip(pattern, x.shape, cos.shape))


def rotary_gradients(grads: Sequence[Tensor], call: Call, outputs: Tensor) -> dict[str, Tensor]:
    """Gradients of x, cos and sin."""
    found = rotary_mul_backward(grads[0], call.input, call.r1, call.r2, call.rotary_mode)
    return dict(zip(("input", "r1", "r2"), found, strict=True))


ROTARY_MUL = Contract("npu_rotary_mul", rotary_mul, refuse_rotary_mul, rotary_gradients)
ROTARY_MUL_BACKWARD = Contract("npu_rotary_mul_backward", rotary_mul_backward, refuse_rotary_mul_backward)

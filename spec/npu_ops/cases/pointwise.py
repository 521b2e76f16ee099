"""Cases of swiglu, rotary position embedding, RMS norm and their gradients."""

# Shapes: B batch, S sequence, N heads, D head dim, T tokens, H hidden.

from __future__ import annotations

import torch

from spec.npu_ops.cases.draws import Case, Draw
from spec.npu_ops.rms_norm import rms_norm
from spec.npu_ops.rotary import SHAPES


def draw_swiglu(draw: Draw) -> Case:
    """Any number of dims, halved along any of them."""
    shape = draw.sizes(draw.integer(1, 4), 1, 9)
    dim = draw.integer(-len(shape), len(shape) - 1)
    shape[dim] *= 2
    x = draw.normal(*shape, dtype=draw.dtype())
    return Case((x,)) if dim == -1 else Case((x, dim))


def draw_swiglu_backward(draw: Draw) -> Case:
    """The gradient of a drawn forward."""
    forward = draw_swiglu(draw)
    x, *dim = forward.args
    shape = list(x.shape)
    shape[dim[0] if dim else -1] //= 2
    return Case((draw.tensor(*shape, dtype=x.dtype), x, *dim))


def refusals_swiglu() -> list[tuple[str, Case, str]]:
    """Calls that must be refused."""
    return [
        ("empty", Case((torch.ones(0, 8),)), "an empty tensor is not supported"),
        ("odd", Case((torch.ones(3, 7),)), "size 7 of dim -1 must be even"),
        ("a slice", Case((torch.ones(3, 9)[:, :8],)), "non-contiguous"),
        ("float64", Case((torch.ones(3, 8).double(),)), "DT_DOUBLE"),
        ("no such dim", Case((torch.ones(3, 8), 2)), "dim 2 is out of range"),
    ]


def refusals_swiglu_backward() -> list[tuple[str, Case, str]]:
    """Calls that must be refused."""
    x = torch.ones(3, 8)
    return [
        ("empty", Case((torch.ones(0, 4), torch.ones(0, 8))), "an empty tensor is not supported"),
        ("grad of another shape", Case((x, x)), "grad_output must be [3, 4]"),
        ("grad of another dtype", Case((x[:, :4].half(), x)), "the input's dtype"),
    ]


def draw_rotary(draw: Draw) -> Case:
    """Every layout of cos and sin in every mode; they may be wider than x."""
    mode, dims = draw.choice(list(SHAPES)), draw.integer(2, 3)
    pattern, dtype = draw.choice(SHAPES[mode][dims]), draw.dtype()
    leading, width = draw.sizes(dims, 1, 6), 2 * draw.integer(1, 9)
    table = [size if kind == "x" else 1 for kind, size in zip(pattern, leading, strict=True)]
    other = draw.choice([dtype, torch.float32])
    cos, sin = (draw.tensor(*table, width, dtype=other) for _ in range(2))
    x = draw.tensor(*leading, width, dtype=dtype)
    return Case((x, cos, sin)) if mode == "half" and draw.flag() else Case((x, cos, sin, mode))


def draw_rotary_backward(draw: Draw) -> Case:
    """The gradient of a drawn forward."""
    x, *rest = draw_rotary(draw).args
    return Case((draw.tensor(*x.shape, dtype=x.dtype), x, *rest))


def edges_rotary() -> list[Case]:
    """The shapes that text and vision use."""
    draw = Draw.seeded(4)
    slice_BNSD = draw.normal(2, 3, 5, 128)[..., :64]
    table_B1SD, table_11SD = draw.normal(2, 1, 5, 64), draw.normal(1, 1, 5, 64)
    vision_BSND, vision_1S1D = draw.normal(1, 7, 4, 128), draw.normal(1, 7, 1, 128)
    return [
        Case((slice_BNSD, table_B1SD, table_B1SD + 1), label="64 of 128 dims, tables by sample"),
        Case((slice_BNSD, table_11SD, table_11SD + 1), label="64 of 128 dims, one table"),
        Case((slice_BNSD.bfloat16(), table_11SD, table_11SD + 1), label="float32 tables for bfloat16 rows"),
        Case((vision_BSND, vision_1S1D, vision_1S1D + 1), label="vision, BSND with 1S1D"),
        Case((vision_BSND[:, :0], vision_1S1D[:, :0], vision_1S1D[:, :0]), label="no tokens"),
    ]


def refusals_rotary() -> list[tuple[str, Case, str]]:
    """Calls that must be refused."""
    x, table = torch.ones(2, 3, 4, 8), torch.ones(1, 1, 4, 8)
    return [
        ("unknown mode", Case((x, table, table, "quarter")), "should be half or interleave, but got quarter"),
        ("float64", Case((x.double(), table, table)), "DT_DOUBLE"),
        ("2-D x", Case((x[0, 0], table[0, 0], table[0, 0])), "3 or 4 dims"),
        ("odd D", Case((x[..., :7], table[..., :7], table[..., :7])), "D = 7 must be even"),
        ("too wide", Case((torch.ones(1, 1, 1, 896),) + (torch.ones(1, 1, 1, 896),) * 2), "below 896"),
        ("cos and sin differ", Case((x, table, table[..., :6])), "but sin is"),
        ("tables of a part of D", Case((x, table[..., :4], table[..., :4])), "does not fit x"),
        ("tables by head and position", Case((x, *(torch.ones(1, 3, 4, 8),) * 2)), "does not fit x"),
        ("tables by sample, interleaved", Case((x, *(torch.ones(2, 1, 4, 8),) * 2, "interleave")), "does not fit x"),
        ("3-D tables", Case((x, table[0], table[0])), "does not fit x"),
        ("a matrix", Case((x, table, table, "half", torch.eye(8))), "rotate="),
        ("float64 cos", Case((x, table.double(), table)), "cos not implemented for DT_DOUBLE"),
        ("float64 sin", Case((x, table, table.double())), "sin not implemented for DT_DOUBLE"),
    ]


def refusals_rotary_backward() -> list[tuple[str, Case, str]]:
    """Calls that must be refused."""
    x, table = torch.ones(2, 3, 4, 8), torch.ones(1, 1, 4, 8)
    return [
        ("unknown mode", Case((x, x, table, table, "quarter")), "should be half or interleave"),
        ("grad of another shape", Case((x[:1], x, table, table)), "grad must have the shape of input"),
    ]


def draw_rms_norm(draw: Draw) -> Case:
    """One or two normalised dims; gamma in the dtype of x or float32."""
    shape, dtype = draw.sizes(draw.integer(2, 4), 1, 9), draw.dtype()
    gamma = draw.normal(*shape[-draw.integer(1, 2) :], dtype=draw.choice([dtype, torch.float32]))
    x = draw.tensor(*shape, dtype=dtype)
    return Case((x, gamma)) if draw.flag() else Case((x, gamma, 1e-5))


def draw_rms_norm_backward(draw: Draw) -> Case:
    """The gradient of a drawn forward."""
    x, gamma, *_ = draw_rms_norm(draw).args
    return Case((draw.tensor(*x.shape, dtype=x.dtype), x, gamma, rms_norm(x, gamma)[1]))


def refusals_rms_norm() -> list[tuple[str, Case, str]]:
    """Calls that must be refused."""
    x = torch.ones(3, 8)
    return [
        ("float64", Case((x.double(), x[0].double())), "DT_DOUBLE"),
        ("gamma of another half type", Case((x.half(), x[0].bfloat16())), "gamma not implemented for DT_BFLOAT16"),
        ("gamma of another size", Case((x, x[0, :7])), "must be the last dims of x"),
    ]


def refusals_rms_norm_backward() -> list[tuple[str, Case, str]]:
    """Calls that must be refused."""
    x, gamma, rstd = torch.ones(3, 8).half(), torch.ones(8), torch.ones(3, 1)
    return [
        ("16-bit rstd", Case((x, x, gamma, rstd.half())), "rstd not implemented for DT_FLOAT16"),
        ("grad of another shape", Case((x[:2], x, gamma, rstd)), "dy must have the shape of input"),
        ("grad of another dtype", Case((x.float(), x, gamma, rstd)), "dy must have the dtype of input"),
    ]

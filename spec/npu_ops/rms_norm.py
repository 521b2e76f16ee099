"""Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467).

Source: op-plugin's documentation of npu_rms_norm and the CANN kernels RmsNorm and RmsNormGrad.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec.npu_ops.contract import Call, Contract, wide
from spec.npu_ops.refuse import check_dtype, refuse_if


def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """x / rms(x) * gamma over the last dims, those of gamma; all in float32, rounded once.

    (Hugging Face's models round x / rms(x) before they multiply: one or two ulps of bfloat16 apart.)

    Returns:
        y in the dtype of `input`, and float32 1 / rms with 1 in place of the normalised dims.
    """
    x = input.to(wide(input))
    rstd = torch.rsqrt(x.square().mean(normalised(gamma), keepdim=True) + epsilon)
    return (x * rstd * gamma.to(x.dtype)).to(input.dtype), rstd


def normalised(gamma: Tensor) -> list[int]:
    """The dims that are normalised, counted from the end."""
    return list(range(-gamma.dim(), 0))


def rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `input` (its dtype) and of gamma (float32 whatever gamma's dtype)."""
    dtype = wide(input)
    unit, to_unit = input.to(dtype) * rstd, dy.to(dtype) * gamma.to(dtype)
    to_input = rstd * (to_unit - unit * (to_unit * unit).mean(normalised(gamma), keepdim=True))
    return to_input.to(input.dtype), (dy.to(dtype) * unit).sum_to_size(gamma.shape)


def refuse_rms_norm(call: Call) -> None:
    """What npu_rms_norm refuses."""
    x, gamma = call.input, call.gamma
    check_dtype("x", x)
    check_dtype("gamma", gamma, tuple({x.dtype: None, torch.float32: None}))
    refuse_if(
        gamma.dim() == 0 or gamma.shape != x.shape[max(x.dim() - gamma.dim(), 0) :],
        f"npu_rms_norm: gamma {tuple(gamma.shape)} must be the last dims of x {tuple(x.shape)}",
    )


def refuse_rms_norm_backward(call: Call) -> None:
    """What npu_rms_norm_backward refuses."""
    refuse_rms_norm(call)
    check_dtype("rstd", call.rstd, (torch.float32,))
    refuse_if(call.dy.shape != call.input.shape, "npu_rms_norm_backward: dy must have the shape of input")
    refuse_if(call.dy.dtype != call.input.dtype, "npu_rms_norm_backward: dy must have the dtype of input")


def rms_norm_gradients(grads: Sequence[Tensor], call: Call, outputs: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Gradients of x and gamma."""
    found = rms_norm_backward(grads[0], call.input, call.gamma, outputs[1])
    return dict(zip(("input", "gamma"), found, strict=True))


RMS_NORM = Contract("npu_rms_norm", rms_norm, refuse_rms_norm, rms_norm_gradients, non_differentiable=(1,))
RMS_NORM_BACKWARD = Contract("npu_rms_norm_backward", rms_norm_backward, refuse_rms_norm_backward)

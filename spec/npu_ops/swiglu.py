"""silu(gate) * up of one tensor that holds both halves (Shazeer, arXiv 2002.05202).

Source: op-plugin's documentation of npu_swiglu and the CANN kernels SwiGlu and SwiGluGrad.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec.npu_ops.contract import Call, Contract, wide
from spec.npu_ops.refuse import check_dtype, refuse_if


def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """silu(first half of `dim`) * second half, in float32, rounded once."""
    gate, up = input.to(wide(input)).chunk(2, dim)
    return (gate * gate.sigmoid() * up).to(input.dtype)


def swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    """Gradient of `input`: d silu(g)/dg = s (1 + g (1 - s)) with s = sigmoid(g); float32, rounded once."""
    gate, up = input.to(wide(input)).chunk(2, dim)
    grad, sigmoid = grad_output.to(gate.dtype), gate.sigmoid()
    to_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([to_gate, grad * gate * sigmoid], dim).to(input.dtype)


def refuse_swiglu(call: Call) -> None:
    """What npu_swiglu refuses; the device's shape inference itself would halve an odd size downwards."""
    x = call.input
    check_dtype("x", x)
    refuse_if(not -x.dim() <= call.dim < x.dim(), f"npu_swiglu: dim {call.dim} is out of range for {x.dim()} dims")
    refuse_if(x.numel() == 0, "npu_swiglu: an empty tensor is not supported")
    refuse_if(x.size(call.dim) % 2 != 0, f"npu_swiglu: size {x.size(call.dim)} of dim {call.dim} must be even")
    refuse_if(not x.is_contiguous(), "npu_swiglu: a non-contiguous tensor is not supported")


def refuse_swiglu_backward(call: Call) -> None:
    """What npu_swiglu_backward refuses."""
    refuse_swiglu(call)
    half = list(call.input.shape)
    half[call.dim] //= 2
    refuse_if(list(call.grad_output.shape) != half, f"npu_swiglu_backward: grad_output must be {half}")
    refuse_if(
        call.grad_output.dtype != call.input.dtype, "npu_swiglu_backward: grad_output must have the input's dtype"
    )


def swiglu_gradients(grads: Sequence[Tensor], call: Call, outputs: Tensor) -> dict[str, Tensor]:
    """Gradient of both halves."""
    return {"input": swiglu_backward(grads[0], call.input, call.dim)}


SWIGLU = Contract("npu_swiglu", swiglu, refuse_swiglu, swiglu_gradients)
SWIGLU_BACKWARD = Contract("npu_swiglu_backward", swiglu_backward, refuse_swiglu_backward)

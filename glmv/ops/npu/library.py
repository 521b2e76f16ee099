"""torch_npu, and what every operator of it asks of its arguments."""

import functools
from typing import Any

import torch
from torch import Tensor

from glmv import npu_package
from glmv.errors import GlmvError
from glmv.ops.registry import say_once

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class NpuError(GlmvError):
    """A tensor is on an NPU, and torch_npu cannot be used."""


@functools.cache
def torch_npu() -> Any:  # noqa: ANN401 - a module without types
    """The package, imported when it is first needed.

    Raises:
        NpuError: it cannot be imported; the message has the reason.
    """
    if why := npu_package.why_not():
        raise NpuError(f"the NPU's operators cannot be used: {why}. `glmv doctor` tells more.")
    import torch_npu

    return torch_npu


def on_npu(tensor: Tensor) -> bool:
    """Whether the tensor is in an NPU's memory."""
    return tensor.device.type == "npu"


def fits(operator: str, why_not: str | None) -> bool:
    """True if nothing stands against `operator`; else say once why PyTorch's implementation runs in its place."""
    if why_not:
        say_once(f"{operator}: {why_not}; PyTorch's own operators run instead (same result, slower)")
    return why_not is None


def why_not_dtype(*tensors: Tensor) -> str | None:
    """Why the NPU's kernels do not take tensors of these dtypes; None if they do."""
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            return f"no kernel for {str(tensor.dtype).removeprefix('torch.')}"
    return None

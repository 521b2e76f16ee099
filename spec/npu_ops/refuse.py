"""How a call is refused."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_ACL = {
    torch.float16: "DT_FLOAT16",
    torch.bfloat16: "DT_BFLOAT16",
    torch.float32: "DT_FLOAT",
    torch.float64: "DT_DOUBLE",
    torch.int8: "DT_INT8",
    torch.int32: "DT_INT32",
    torch.int64: "DT_INT64",
    torch.bool: "DT_BOOL",
    torch.uint8: "DT_UINT8",
}


class Refused(RuntimeError):
    """The operator does not take this call; on the device it raises RuntimeError with the vendor's wording."""


def refuse_if(wrong: bool, message: str) -> None:
    """Raise `Refused(message)` when `wrong`."""
    if wrong:
        raise Refused(message)


def check_dtype(name: str, tensor: Tensor | None, allowed: Sequence[torch.dtype] = FLOATS) -> None:
    """Refuse a tensor whose dtype the kernel has no implementation for."""
    if tensor is not None and tensor.dtype not in allowed:
        supported = ",".join(_ACL[dtype] for dtype in allowed)
        found = _ACL.get(tensor.dtype, str(tensor.dtype))
        raise Refused(f"Tensor {name} not implemented for {found}, should be in dtype support list [{supported}].")


def refuse_undescribed(operator: str, **given: object) -> None:
    """Refuse options that this contract does not describe, whether or not the device has them."""
    for name, value in given.items():
        refuse_if(value is not None, f"{operator}: {name}={value!r} is not described by this contract")

"""The format of a recording: every call of an operator `npu::*`, in order, its tensors without their values.

    [{"op": "npu_swiglu", "args": [{"shape": [8, 32], "stride": [32, 1], "dtype": "bfloat16"}, -1], "kwargs": {}}, ...]

A dtype that is an argument itself is {"dtype": "float32"}; lists may hold tensors; everything else stands as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glmv.errors import GlmvError


class RecordingError(GlmvError):
    """A file that is no recording."""


@dataclass(frozen=True)
class RecordedCall:
    """One call, on tensors of any device (values are of no interest)."""

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def write_recording(calls: Iterable[RecordedCall], path: Path) -> None:
    """Write calls as JSON; in place of a tensor stands anything with its shape, stride and dtype."""
    rows = [{"op": call.op, "args": _encode(call.args), "kwargs": _encode(call.kwargs)} for call in calls]
    path.write_text(json.dumps(rows), encoding="utf-8")


def read_recording(path: Path) -> list[RecordedCall]:
    """The calls of a recording, on meta tensors.

    Raises:
        RecordingError: the file cannot be read, or holds something else.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise TypeError(f"a list of calls is due, not a {type(rows).__name__}")
        return [RecordedCall(row["op"], tuple(_decode(row["args"])), _decode(row["kwargs"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordingError(f"{path} is not a recording of operator calls: {error!r}") from error


def _encode(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    if isinstance(value, list | tuple) and not hasattr(value, "dtype"):
        return [_encode(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if hasattr(value, "dtype"):
        stride = value.stride() if isinstance(value, Tensor) else value.stride
        return {"shape": list(value.shape), "stride": list(stride), "dtype": _name(value.dtype)}
    return value


def _decode(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype"}:
        return getattr(torch, value["dtype"])
    if value.keys() == {"shape", "stride", "dtype"}:
        dtype = getattr(torch, value["dtype"])
        return torch.empty_strided(value["shape"], value["stride"], dtype=dtype, device="meta")
    return {key: _decode(item) for key, item in value.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

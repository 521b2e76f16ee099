"""Counters of what a program made the emulated device do.

    with count() as counted:
        layer(hidden)
    assert counted.syncs == 0

Numbers are those between entering the block and reading them, or leaving it; blocks may be nested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from glmv.verify.emulated_npu.state import extension

Totals = Mapping[str, int]


@dataclass(frozen=True)
class TensorMeta:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Recorded:
    """One call of an `npu::*` operator; tensors in `args` and `kwargs` are replaced by their `TensorMeta`."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass
class Reading:
    """All counters at one moment."""

    calls: Totals
    syncs: Totals
    collectives: Mapping[str, tuple[int, int]]

    @classmethod
    def now(cls) -> Reading:
        """What the extension has counted since it was loaded."""
        native = extension()
        return cls(native.calls(), native.syncs(), native.collectives())


@dataclass
class Counted:
    """What happened since `start`, up to `end` or to now.

    Attributes:
        recorded: calls of `npu::*` operators in order, if `count` was asked to record them.
    """

    start: Reading
    end: Reading | None = None
    recorded: list[Recorded] = field(default_factory=list)

    @property
    def calls(self) -> dict[str, int]:
        """Operator calls by name: `npu_swiglu`, its gradient `npu_swiglu.backward`, and PyTorch's own `aten::add`."""
        return difference(self.start.calls, self._last().calls)

    @property
    def sync_causes(self) -> dict[str, int]:
        """Moments where the host waited for the device, by operator or "item", "copy to the host", "synchronize"."""
        return difference(self.start.syncs, self._last().syncs)

    @property
    def syncs(self) -> int:
        """How often the host waited for the device."""
        return sum(self.sync_causes.values())

    @property
    def collectives(self) -> dict[str, tuple[int, int]]:
        """(calls, bytes of this rank's input) of each collective."""
        old = self.start.collectives
        rows = {
            name: (calls - old.get(name, (0, 0))[0], size - old.get(name, (0, 0))[1])
            for name, (calls, size) in self._last().collectives.items()
        }
        return {name: row for name, row in rows.items() if row[0]}

    def _last(self) -> Reading:
        return self.end or Reading.now()


_recording: list[Counted] = []


@contextmanager
def count(*, record: bool = False) -> Iterator[Counted]:
    """Count what the block does. `record` keeps the arguments' metadata of every `npu::*` call as well."""
    counted = Counted(Reading.now())
    if record:
        _recording.append(counted)
    try:
        yield counted
    finally:
        counted.end = Reading.now()
        if record:
            _recording[:] = [open_one for open_one in _recording if open_one is not counted]


def note_call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Count a call of an `npu::*` operator, and record it where asked."""
    extension().count_call(name)
    if _recording:
        call = Recorded(name, meta(args), {key: meta(value) for key, value in kwargs.items()})
        for counted in _recording:
            counted.recorded.append(call)


def meta(value: Any) -> Any:  # noqa: ANN401
    """`value` with every tensor replaced by its metadata."""
    if isinstance(value, Tensor):
        return TensorMeta(tuple(value.shape), value.stride(), value.dtype, value.requires_grad)
    if isinstance(value, list | tuple):
        return type(value)(meta(item) for item in value)
    return value


def difference(old: Totals, new: Totals) -> dict[str, int]:
    """What was added, by name."""
    return {name: total - old.get(name, 0) for name, total in new.items() if total > old.get(name, 0)}

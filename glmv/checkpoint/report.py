"""What a conversion tells: progress while it runs, a summary at the end."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from glmv.checkpoint.errors import some

# Called with (bytes done so far, bytes in all).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Report:
    """Result of a conversion."""

    path: Path
    tensors: int
    bytes: int
    seconds: float
    notices: tuple[str, ...] = ()


class Counter:
    """Adds up bytes and passes them on."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self._progress = 0, total, progress

    def add(self, nbytes: int) -> None:
        """Count what has just been written."""
        self.done += nbytes
        if self._progress:
            self._progress(self.done, self.total)


def environment_notices() -> list[str]:
    """Say what is ignored of the environment."""
    if "GLM4V_DCP_3D" not in os.environ:
        return []
    return ["GLM4V_DCP_3D has no effect: the checkpoint records the layout of its experts."]


def carried_notice(carried: list[str]) -> list[str]:
    """Say which tensors the model has no place for."""
    if not carried:
        return []
    return [f"{len(carried)} tensor(s) that the model has no place for are carried along: {some(carried)}."]

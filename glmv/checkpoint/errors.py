"""What a checkpoint can have wrong with it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from glmv.errors import GlmvError


class CheckpointError(GlmvError):
    """A checkpoint that can't be read, doesn't fit, or must not be overwritten: file, key, reason, way out."""


def some(names: Collection[str], shown: int = 3) -> str:
    """Quote the first few names: `a, b, c and 9 more`."""
    listed = sorted(names)
    rest = len(listed) - shown
    return ", ".join(listed[:shown]) + (f" and {rest} more" if rest > 0 else "")


@contextlib.contextmanager
def system_errors_told() -> Iterator[None]:
    """Turn the system's refusals (no space, no rights) into a CheckpointError."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise CheckpointError(f"{where}{error.strerror or error}. Check space and rights.") from None

"""What a checkpoint can have wrong with it."""

from __future__ import annotations

from collections.abc import Collection

from glmv.errors import GlmvError


class CheckpointError(GlmvError):
    """A checkpoint that can't be read, doesn't fit, or must not be overwritten: file, key, reason, way out."""


def some(names: Collection[str], shown: int = 3) -> str:
    """Quote the first few names: `a, b, c and 9 more`."""
    listed = sorted(names)
    rest = len(listed) - shown
    return ", ".join(listed[:shown]) + (f" and {rest} more" if rest > 0 else "")

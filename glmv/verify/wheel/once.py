"""Directories that are made once and found complete or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def made_once(directory: Path) -> Iterator[Path]:
    """A fresh directory to fill, which gets its name when the block ends well; leftovers of a failure are removed."""
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    yield unfinished
    unfinished.rename(directory)

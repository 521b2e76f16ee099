"""Where things stand in a training checkpoint's root.

latest_checkpointed_iteration.txt       "release" or an iteration; written last
release/  iter_0000100/  ...            DCP files, glmv.json and, for the export, hf_assets/
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from glmv.checkpoint.errors import CheckpointError, some
from glmv.checkpoint.manifest import write_atomically

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
ASSETS = "hf_assets"
CARRIED = "carried.safetensors"


def iteration_name(iteration: int) -> str:
    """Directory name of a training iteration."""
    return f"iter_{iteration:07d}"


@contextlib.contextmanager
def replacing(final: Path) -> Iterator[Path]:
    """Give a new directory to fill; it gets its final name if nothing fails, and is removed otherwise."""
    temporary = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.replace(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_files(files: Iterable[Path], directory: Path) -> None:
    """Copy files into a directory, which is made if necessary."""
    directory.mkdir(exist_ok=True)
    for path in files:
        shutil.copyfile(path, directory / path.name)


def write_tracker(root: Path, content: str) -> None:
    """Point the root at one of its checkpoints."""
    write_atomically(root / TRACKER, f"{content}\n")


def resolve_checkpoint(root: str | Path) -> Path:
    """Find the checkpoint that a root points at.

    Args:
        root: the directory with the tracker file, or one checkpoint (`release`, `iter_0000100`) itself.
    Raises:
        CheckpointError: nothing is there, or the tracker points nowhere.
    """
    root = Path(root)
    tracker = root / TRACKER
    if tracker.is_file():
        return _tracked(root, tracker)
    if (root / ".metadata").is_file():
        return root
    raise CheckpointError(_why_not_a_checkpoint(root))


def _tracked(root: Path, tracker: Path) -> Path:
    content = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if content != RELEASE and not (content.isascii() and content.isdigit()):
        raise CheckpointError(f"{tracker}: {content[:40]!r} is neither '{RELEASE}' nor an iteration. {_choices(root)}")
    directory = root / (RELEASE if content == RELEASE else iteration_name(int(content)))
    if not directory.is_dir():
        raise CheckpointError(f"{tracker}: points to {directory.name}, which is not there. {_choices(root)}")
    return directory


def _choices(root: Path) -> str:
    present = [path.name for path in root.iterdir() if (path / ".metadata").is_file()]
    if not present:
        return f"{root} holds no complete checkpoint; give another root."
    return f"Write one of these into the tracker, or give its directory: {some(present)}."


def _why_not_a_checkpoint(root: Path) -> str:
    if not root.exists():
        return f"{root}: does not exist. Give a checkpoint's root (training.load), or convert one with `glmv convert`."
    if (root / "config.json").is_file():
        return f"{root}: is a Hugging Face directory. Convert it first: glmv convert hf-to-dcp --hf-dir {root}"
    if not root.is_dir():
        return f"{root}: is a file. Give a checkpoint's root."
    return f"{root}: has no {TRACKER}. {_choices(root)}"

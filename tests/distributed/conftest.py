"""Ranks for tests: child processes that see the repository and this directory."""

import os
from pathlib import Path

import pytest

from glmv.parallel.launch import LaunchResult, launch
from glmv.tiny.make import make_tiny

HERE = Path(__file__).parent


def pytest_addoption(parser):
    parser.addoption(
        "--grid",
        default="pairs",
        choices=["pairs", "all", "nightly"],
        help="parity grid: every pair of choices on 4 ranks, all combinations on 2 and 4, or every pair on 8",
    )


def start_ranks(*command: object, nproc: int, timeout_s: float = 270, cwd: Path | None = None) -> LaunchResult:
    """Run `python COMMAND` on `nproc` ranks; a command that begins with a file of `workers/` runs that file."""
    first, *rest = map(str, command)
    script = HERE / "workers" / first
    paths = [str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")]
    return launch(
        [str(script) if script.is_file() else first, *rest],
        nproc=nproc,
        timeout_s=timeout_s,  # before the test's own limit, so that the stacks of hanging ranks are seen
        grace_s=60,  # a rank that fails like the others may be slower than they
        env={"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=cwd,
    )


@pytest.fixture(scope="session")
def ranks():
    return start_ranks


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory) -> Path:
    """The tiny model's Hugging Face directory. Read it; copy it before changing anything."""
    return make_tiny(tmp_path_factory.mktemp("hf") / "tiny")

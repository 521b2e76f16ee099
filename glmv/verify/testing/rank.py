"""Who a pytest session is, when it is one of several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from glmv.verify.testing.board import Board


@dataclass
class Rank:
    """One rank of a group of test sessions.

    Attributes:
        rank, world_size: as everywhere.   device: kind of device ("cpu", "cuda", "npu").
        shared: the directory that all ranks share during the test that runs now.
        generation: how many process groups this rank has joined.
        board: what the ranks tell each other, once they have had to.   tests: how many of them needed it.
    """

    rank: int
    world_size: int
    device: str
    shared: Path | None = None
    generation: int = 0
    board: Board | None = None
    tests: int = 0


RANK = pytest.StashKey[Rank]()

"""What a test on several ranks may ask for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from glmv.verify.testing.board import Board
from glmv.verify.testing.rank import RANK

if TYPE_CHECKING:
    import torch

    from glmv.parallel.process import Process


@pytest.fixture(scope="session")
def process(request: pytest.FixtureRequest) -> Iterator[Process]:
    """This rank, within the process group of all ranks. Needs the marker `world_size` or `npu`."""
    from glmv.parallel.process import process_group

    rank = request.config.stash.get(RANK, None)
    if rank is None:
        pytest.fail("the fixture `process` is for tests with the marker world_size(n) or npu", pytrace=False)
    # Every group has names of its own in the store, so that it does not find an earlier one's addresses there.
    rank.generation += 1
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank.generation)
    with process_group(rank.device) as joined:
        yield joined


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the test computes: this rank's device, or in a test without ranks what `--device` says."""
    import torch

    from glmv.parallel.process import choose_device, take_device

    rank = request.config.stash.get(RANK, None)
    if rank is None:
        return torch.device(request.config.getoption("--device"))
    # As the trainer does it: before torch_npu is imported, torch knows no device of the name "npu".
    device = choose_device(rank.device, int(os.environ.get("LOCAL_RANK", "0")))
    take_device(device)
    return device


@pytest.fixture(scope="session")
def shared_dir_factory(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """`shared_dir_factory(name)`: a new directory that all ranks share. Collective; for fixtures of a whole module."""
    rank = request.config.stash.get(RANK, None)
    made = 0

    def make(name: str) -> Path:
        nonlocal made
        if rank is None or rank.world_size == 1:
            return tmp_path_factory.mktemp(name)
        made += 1
        board = rank.board = rank.board or Board.of_launch()
        if rank.rank == 0:
            board.put(f"directories/{made}", str(tmp_path_factory.mktemp(name)))
        return Path(board.wait_for_ranks(f"directories/{made}")[0])

    return make


@pytest.fixture
def shared_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An empty directory that all ranks of the test share."""
    rank = request.config.stash.get(RANK, None)
    if rank is None or rank.shared is None:
        return tmp_path
    return rank.shared

"""Tests in which nothing goes wrong; each rank leaves its process id in PIDS."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

RUNS = []


@pytest.fixture(scope="module", autouse=True)
def process_ids():
    if "PIDS" in os.environ:
        (Path(os.environ["PIDS"]) / str(os.getpid())).touch()


@pytest.fixture(scope="module")
def once():
    RUNS.append("once")
    return RUNS


@pytest.mark.parametrize("case", range(4))
@pytest.mark.world_size(2)
def test_of_two(process, once, case):
    total = torch.tensor(float(process.rank))
    dist.all_reduce(total)
    assert total == 1
    assert once == ["once"]


@pytest.mark.world_size(3)
def test_of_three(process, device):
    assert (process.world_size, process.device) == (3, device)


@pytest.mark.world_size(1)
def test_of_one(process):
    assert process.world_size == 1


def test_without_ranks():
    assert "RANK" not in os.environ


@pytest.mark.world_size(2)
def test_directories(shared_dir, tmp_path, process):
    (shared_dir / str(process.rank)).touch()
    dist.barrier()
    assert sorted(path.name for path in shared_dir.iterdir()) == ["0", "1"]
    assert tmp_path != shared_dir


@pytest.fixture(scope="module")
def directory_of_all(shared_dir_factory, process):
    first, second = shared_dir_factory("all"), shared_dir_factory("all")
    (second / str(process.rank)).touch()
    dist.barrier()
    return first, second


@pytest.mark.world_size(2)
def test_directories_of_fixtures(directory_of_all):
    first, second = directory_of_all
    assert [len(list(directory.iterdir())) for directory in (first, second)] == [0, 2]


@pytest.mark.skipif("FOR_EVER" not in os.environ, reason="only for a session that is to be killed")
@pytest.mark.world_size(2)
def test_for_ever():
    (Path(os.environ["PIDS"]) / f"waiting-{os.getpid()}").touch()
    time.sleep(3600)

"""What torchrun's ranks run: WHAT says what goes wrong on rank 1."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

WHAT = os.environ.get("WHAT", "nothing")
OF_THIS_RANK = range(1 + int(os.environ.get("RANK", "0"))) if WHAT == "other cases" else range(1)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", OF_THIS_RANK)
def test_together(process, shared_dir, case):
    (shared_dir / str(process.rank)).touch()
    dist.barrier()
    assert len(list(shared_dir.iterdir())) == 2


def test_without_ranks():
    assert os.environ["RANK"] == "0"
    assert not dist.is_initialized()
    assert not dist.is_initialized()


@pytest.mark.world_size(3)
def test_of_three(process):
    assert process.world_size == 3


@pytest.mark.world_size(2)
@pytest.mark.timeout(6 if WHAT in ("sleeps", "polls") else 200)
def test_the_bad_one(process):
    if process.rank == 1 and WHAT == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if process.rank == 1 and WHAT == "sleeps":
        time.sleep(3600)
    while process.rank == 1 and WHAT == "polls":
        pass
    assert process.rank == 0 or WHAT != "fails", "only rank 0 is right"
    dist.all_reduce(torch.ones(()))


@pytest.mark.world_size(2)
def test_afterwards(process):
    dist.barrier()

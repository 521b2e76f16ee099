"""Red tests after which ranks are kept, and red tests after which they are not."""

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.world_size(2)
said_no = []


def test_says_no(process):
    said_no.append(process.rank)
    dist.barrier()
    pytest.fail("no")


def test_kept_after_all_said_no(process):
    assert said_no == [process.rank]


def test_rank_1_says_no(process):
    dist.barrier()
    assert process.rank == 0


def test_kept_after_one_said_no(process):
    assert said_no == [process.rank]


def test_breaks(process):
    raise RuntimeError("who knows what is broken")


def test_new_after_an_error(process):
    assert said_no == []
    said_no.append(process.rank)


def test_says_no_with_a_collective_open(process):
    if process.rank == 0:
        dist.isend(torch.ones(()), dst=1)
    pytest.fail("no")


def test_new_after_a_collective_left_open(process):
    assert said_no == []

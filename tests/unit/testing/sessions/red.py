"""What can go wrong on one of two ranks, and between two such tests one that is right."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

pytestmark = [pytest.mark.world_size(2), pytest.mark.timeout(200)]
CASES_OF_THIS_RANK = range(1 + int(os.environ.get("RANK", "0")))


def agree(process):
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == 2


def test_killed(process):
    if process.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    agree(process)


def test_right_after_killed(process):
    agree(process)


def test_exits(process):
    if process.rank == 0:
        print("last words", flush=True)
        os._exit(3)
    agree(process)


def test_right_after_exits(process):
    agree(process)


@pytest.mark.timeout(6)
def test_sleeps(process):
    if process.rank == 1:
        time.sleep(3600)
    agree(process)


def test_right_after_sleeps(process):
    agree(process)


@pytest.mark.timeout(6)
def test_polls_for_ever(process):
    """What accelerators do in a collective that never ends: keep the processor busy, outside of torch.distributed."""
    dist.barrier()
    while process.world_size == 2:
        pass


def test_right_after_polls_for_ever(process):
    agree(process)


def test_skips_on_one(process):
    if process.rank == 1:
        pytest.skip("not today")


def test_right_after_skips_on_one(process):
    agree(process)


@pytest.mark.parametrize("case", CASES_OF_THIS_RANK)
def test_has_other_cases(process, case):
    agree(process)


def test_right_after_has_other_cases(process):
    agree(process)


def test_mismatched_collective(process):
    if process.rank == 0:
        dist.all_reduce(torch.ones(()))
    else:
        dist.broadcast(torch.ones(()), src=0)


def test_right_after_mismatched_collective(process):
    agree(process)


def test_left_out_collective(process):
    if process.rank == 0:
        agree(process)


def test_right_after_left_out_collective(process):
    agree(process)


def test_forgotten_send(process):
    if process.rank == 0:
        dist.isend(torch.ones(()), dst=1)


def test_right_after_forgotten_send(process):
    agree(process)


def test_forgotten_send_in_a_group_of_its_own(process):
    group = dist.new_group([0, 1])
    if process.rank == 0:
        dist.isend(torch.ones(()), dst=1, group=group)


def test_right_after_forgotten_send_in_a_group_of_its_own(process):
    agree(process)


def test_fails_before_collective(process):
    if process.rank == 1:
        assert process.rank == 0, "only rank 0 is right"
    agree(process)


def test_right_after_fails_before_collective(process):
    agree(process)


def test_fails_alike(process):
    agree(process)
    assert process.world_size == 3


def test_right_after_fails_alike(process):
    agree(process)


def test_fails_in_different_ways(process):
    if process.rank == 0:
        raise KeyError("of rank 0")
    raise ValueError("of rank 1")


@pytest.fixture
def broken_on_one(process):
    if process.rank == 1:
        raise RuntimeError("no such thing")
    yield
    agree(process)


def test_setup_fails_on_one(broken_on_one):
    assert broken_on_one is None


@pytest.fixture
def broken_at_the_end(process):
    yield
    assert process.rank == 0


def test_teardown_fails_on_one(broken_at_the_end):
    assert broken_at_the_end is None


def test_right_after_teardown_fails_on_one(process):
    agree(process)


def test_skips_alike(process):
    pytest.skip("nobody wants to")


@pytest.mark.xfail(reason="known")
def test_xfails_alike(process):
    assert process.world_size == 3

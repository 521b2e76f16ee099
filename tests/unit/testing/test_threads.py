"""Ranks as threads: an exchange of rows that is uneven, empty, and has a gradient."""

import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from hypothesis import given, settings
from hypothesis import strategies as st

from glmv.verify.testing.threads import ThreadRankError, run_ranks

RANKS = 3
ROWS = st.lists(st.lists(st.integers(0, 4), min_size=RANKS, max_size=RANKS), min_size=RANKS, max_size=RANKS)


def exchange(rank, counts):
    """What `rank` gets when `counts[a][b]` rows go from a to b; a row says who sent it."""
    mine = torch.full((sum(counts[rank]), 2), float(rank), requires_grad=True)
    got = collectives.all_to_all_single_autograd(mine, [row[rank] for row in counts], counts[rank], dist.group.WORLD)
    (got * (rank + 1)).sum().backward()
    return got.detach(), mine.grad


@settings(max_examples=20)
@given(ROWS)
def test_rows_arrive_in_the_order_of_their_senders(counts):
    for rank, (got, _) in enumerate(run_ranks(RANKS, lambda rank: exchange(rank, counts))):
        assert got[:, 0].tolist() == [float(sender) for sender in range(RANKS) for _ in range(counts[sender][rank])]


@settings(max_examples=20)
@given(ROWS)
def test_gradients_return_to_the_senders(counts):
    for rank, (_, grad) in enumerate(run_ranks(RANKS, lambda rank: exchange(rank, counts))):
        assert grad[:, 0].tolist() == [float(to + 1) for to in range(RANKS) for _ in range(counts[rank][to])]


def fails_on_one(rank):
    if rank == 1:
        raise KeyError("of rank 1")
    dist.barrier()


def test_a_failing_rank_is_named_and_ends_the_others():
    with pytest.raises(ThreadRankError, match="rank 1: KeyError: 'of rank 1'"):
        run_ranks(RANKS, fails_on_one)
    assert run_ranks(RANKS, lambda rank: rank) == [0, 1, 2]


def test_ranks_that_wait_for_ever_are_given_up():
    with pytest.raises(ThreadRankError, match=r"ranks \[0, 1\] were not done after 5 s"):
        run_ranks(RANKS, lambda rank: dist.barrier() if rank < 2 else None, timeout_s=5)
    assert run_ranks(RANKS, lambda rank: rank) == [0, 1, 2]
    assert not any("be" in thread.name for thread in threading.enumerate())


def test_it_leaves_no_process_group_behind():
    run_ranks(2, lambda rank: dist.barrier())
    assert not dist.is_initialized()

"""Examples of hypothesis on two ranks."""

import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.world_size(2), pytest.mark.timeout(200)]


@settings(max_examples=30)
@given(size=st.integers(1, 50), value=st.floats(-1, 1))
def test_all_ranks_draw_the_same(process, size, value):
    total = torch.full((size,), value)
    dist.all_reduce(total)
    assert torch.equal(total, torch.full((size,), value) * 2)


@settings(max_examples=100)
@given(size=st.integers(0, 1000))
def test_fails_on_one_rank(process, size):
    dist.barrier()
    if process.rank == 1:
        assert size < 10


@given(size=st.integers(0, 1000))
def test_fails_before_a_collective(process, size):
    if process.rank == 1:
        assert size < 10
    dist.barrier()


BY_RANK = int(os.environ.get("RANK", "0"))


@given(size=st.integers(BY_RANK, 100))
def test_draws_by_rank(process, size):
    dist.barrier()


@given(data=st.data())
def test_draws_another_number_by_rank(process, data):
    data.draw(st.integers(0, 1 if process.rank == 0 else 100000))
    assert data is not None


@given(size=st.integers(0, 9))
def test_right_afterwards(process, size):
    dist.barrier()


@given(size=st.integers(0, 9))
@pytest.mark.parametrize("case", ["a", "b"])
def test_cases(process, case, size):
    dist.barrier()

"""Attention over ranks that share sequences: output and gradients are those of the law on the whole."""

import functools

import pytest
import torch
import torch.distributed as dist
from context_cases import CASES, SHARED, context, documents_of, inputs_of, law_of, run_part, whole_of
from layouts import everyone

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
KERNELS = pytest.mark.parametrize("kernel", ["eager", "sdpa", "flash"])


@pytest.fixture(scope="module")
def group(process):
    """Collective: `group(degrees)`, made once: groups of ranks are slow to make."""
    return functools.cache(lambda degrees: context(degrees, process))


def check(own, case, dtype, kernel, judge, shared=SHARED):
    document_BS = documents_of(case)
    parts = everyone(run_part(own, document_BS, inputs_of(document_BS, shared), dtype, kernel))
    if dist.get_rank() == 0:
        judge(whole_of(parts[: own.degrees.size], document_BS, own.degrees), law_of(case, shared), dtype)


@pytest.mark.world_size(2)
@DTYPES
@KERNELS
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("degrees", ["ulysses2", "ring2"])
def test_two_ranks_attend_as_one(degrees, case, kernel, dtype, group, judge):
    check(group(degrees), case, dtype, kernel, judge)


@pytest.mark.world_size(4)
@KERNELS
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("degrees", ["ulysses4", "ring4", "ring2_ulysses2"])
def test_four_ranks_attend_as_one(degrees, case, kernel, group, judge):
    check(group(degrees), case, torch.float64, kernel, judge)


@pytest.mark.world_size(4)
@KERNELS
@pytest.mark.parametrize("degrees", ["ring4", "ring2_ulysses2"])
def test_fp32_rounds_no_more_than_on_one_rank(degrees, kernel, group, judge):
    check(group(degrees), "packed", torch.float32, kernel, judge)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("degrees", ["ulysses2", "ring2"])
def test_bf16_rounds_no_more_than_on_one_rank(degrees, group, judge):
    check(group(degrees), "length37", torch.bfloat16, "flash", judge)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("shared", [1, 2, 4])
@pytest.mark.parametrize("degrees", ["ulysses2", "ulysses4", "ring2_ulysses2"])
def test_key_heads_fewer_than_ranks_are_repeated_and_their_gradients_summed(degrees, shared, group, judge):
    check(group(degrees), "length7", torch.float64, "sdpa", judge, shared)

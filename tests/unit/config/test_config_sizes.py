"""Mesh sizes that do not multiply are told with their numbers: in the file where it alone decides, else at start."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glmv.config import load_config
from glmv.config.parallel import ParallelConfig
from glmv.config.sizes import misfit

CP = "ring_attention_size x ulysses_parallel_size"
SAMPLE = f"data_parallel_size x tensor_parallel_size x {CP}"
IN_THE_FILE = {
    "shards_across_sequences": (
        ["fully_shard_parallel_size=4", "ring_attention_size=2", "ulysses_parallel_size=3"],
        f"fully_shard_parallel_size = 4 is no multiple of {CP} = 2 x 3 = 6: ",
    ),
    "experts_against_data": (
        ["data_parallel_size=8", "expert_parallel_size=3"],
        f"expert_parallel_size = 3 does not divide the number of ranks ({SAMPLE} = 8 x 1 x 1 x 1 = 8 ranks).",
    ),
    "more_expert_ranks_than_ranks": (
        ["data_parallel_size=8", "expert_parallel_size=4", "expert_fully_shard_parallel_size=4"],
        "expert_parallel_size x expert_fully_shard_parallel_size = 4 x 4 = 16 "
        f"does not divide the number of ranks ({SAMPLE} = 8 x 1 x 1 x 1 = 8 ranks).",
    ),
    "shards_against_data": (
        ["fully_shard_parallel_size=5", "data_parallel_size=8", "expert_parallel_size=4"],
        "tensor_parallel_size x fully_shard_parallel_size = 1 x 5 = 5 does not divide the number of ranks (data_para",
    ),
}
sizes = st.integers(1, 3)


@pytest.mark.parametrize("case", IN_THE_FILE)
def test_sizes_that_cannot_be_laid_out_are_refused_with_the_file(refusal, case):
    overrides, said = IN_THE_FILE[case]
    assert f": parallel.{said}" in refusal("", "", *[f"parallel.{override}" for override in overrides])


def test_what_only_the_number_of_ranks_decides_is_left_to_the_start(published):
    parallel = load_config(published).parallel
    assert misfit(parallel) is None
    assert misfit(parallel, 32) is None
    said = "expert_parallel_size = 16 does not divide the number of ranks (WORLD_SIZE = 24)."
    assert (misfit(parallel, 24) or "").startswith(said)


def test_experts_may_have_copies_of_their_own():
    copied = ParallelConfig(expert_parallel_size=2, expert_fully_shard_parallel_size=2)
    assert misfit(copied, 8) is None


@settings(max_examples=150)
@given(sizes, sizes, sizes, sizes, st.none() | sizes, st.none() | sizes, st.just("auto") | st.integers(1, 9))
def test_a_layout_exists_or_is_refused(tensor, ring, ulysses, expert, data, expert_shard, shard):
    config = ParallelConfig.model_construct(
        tensor_parallel_size=tensor,
        ring_attention_size=ring,
        ulysses_parallel_size=ulysses,
        expert_parallel_size=expert,
        data_parallel_size=data,
        expert_fully_shard_parallel_size=expert_shard,
        fully_shard_parallel_size=shard,
    )

    def fits(ranks):
        whole = tensor * ring * ulysses
        return (
            (ranks % whole == 0 if data is None else ranks == data * whole)
            and ranks % (expert * (expert_shard or 1)) == 0
            and (shard == "auto" or (ranks % (tensor * shard) == 0 and shard % (ring * ulysses) == 0))
        )

    step = math.lcm(tensor * ring * ulysses, expert * (expert_shard or 1), tensor * (1 if shard == "auto" else shard))
    some = [n for n in (*range(1, 82), step) if fits(n)]  # 81: the largest number that data can name
    assert (misfit(config) is None) == bool(some)
    for n in [*some[:1], 1, 2, 6, 12]:
        assert (misfit(config, n) is None) == fits(n)

"""Sizes of a config on a number of ranks."""

import pytest

from glmv.config.parallel import ParallelConfig
from glmv.parallel.mesh import ParallelError, Sizes

EP, EFSDP, SHARD = "expert_parallel_size", "expert_fully_shard_parallel_size", "fully_shard_parallel_size"


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({}, Sizes(1, 8, 1, 8, 1)),
        ({SHARD: 2}, Sizes(4, 2, 1, 8, 1)),
        ({EP: 4}, Sizes(1, 8, 1, 2, 4)),
        ({EP: 2, EFSDP: 2}, Sizes(1, 8, 2, 2, 2)),
        ({EP: 2, EFSDP: 1, SHARD: 4}, Sizes(2, 4, 4, 1, 2)),
        ({EP: 8, "data_parallel_size": 8}, Sizes(1, 8, 1, 1, 8)),
    ],
)
def test_the_ranks_are_laid_out_twice(config, sizes):
    assert Sizes.of(ParallelConfig(**config), 8) == sizes


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({EP: 3}, "parallel.expert_parallel_size = 3 does not divide the number of ranks (WORLD_SIZE = 8)"),
        (
            {EP: 4, EFSDP: 4},
            f"parallel.{EP} x {EFSDP} = 4 x 4 = 16 does not divide the number of ranks (WORLD_SIZE = 8)",
        ),
        ({SHARD: 3}, "= 1 x 3 = 3 does not divide the number of ranks (WORLD_SIZE = 8)"),
        ({"data_parallel_size": 4}, "= 4 ranks, but WORLD_SIZE = 8"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_with_the_numbers(config, said):
    with pytest.raises(ParallelError) as caught:
        Sizes.of(ParallelConfig(**config), 8)
    assert said in str(caught.value)

"""Do the sizes of the meshes multiply to one number of ranks?

The ranks are laid out twice. For everything but experts:   ranks = data x tensor x ring x ulysses
  and, cut otherwise,                                       ranks = replicas x fully_shard x tensor
For experts:                                                ranks = copies x expert x expert_fully_shard
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glmv.config.parallel import ParallelConfig

SEQUENCE = ("ring_attention_size", "ulysses_parallel_size")
SAMPLE = ("tensor_parallel_size", *SEQUENCE)


def misfit(config: ParallelConfig, world_size: int | None = None) -> str | None:
    """Why no layout has these sizes, with the numbers; None if one has, or if only the number of ranks will tell.

    Args:
        world_size: the number of ranks; None where it is not known yet, while the file is read.
    """
    return _across_groups(config) or _ranks(config, world_size)


def _across_groups(config: ParallelConfig) -> str | None:
    shard = config.fully_shard_parallel_size
    if shard != "auto" and shard % _value(config, SEQUENCE):
        return (
            f"fully_shard_parallel_size = {shard} is no multiple of {_product(config, SEQUENCE)}: "
            "ranks that share a sequence share one copy of the parameters.\nMake it a multiple, or auto"
        )
    return None


def _ranks(config: ParallelConfig, world_size: int | None) -> str | None:
    """Compare everything that says how many ranks there are, and see that the other sizes divide their number."""
    counts: dict[int, str] = {}
    if config.data_parallel_size is not None:
        everything = ("data_parallel_size", *SAMPLE)
        counts[_value(config, everything)] = f"{_product(config, everything)} ranks"
    if world_size is not None and world_size not in counts:
        counts[world_size] = f"WORLD_SIZE = {world_size}"
    if len(counts) > 1:
        return f"{', but '.join(counts.values())}.\nMake them one number, or leave out what follows from the others"
    both = ("expert_parallel_size", "expert_fully_shard_parallel_size")
    divisors: list[tuple[str, ...]] = [SAMPLE, both if config.expert_fully_shard_parallel_size else both[:1]]
    if config.fully_shard_parallel_size != "auto":
        divisors.append(("tensor_parallel_size", "fully_shard_parallel_size"))
    for ranks, source in counts.items():
        for names in divisors:
            if ranks % _value(config, names):
                return f"{_product(config, names)} does not divide the number of ranks ({source}).\nChange one of them"
    return None


def _value(config: ParallelConfig, names: tuple[str, ...]) -> int:
    return math.prod(getattr(config, name) for name in names)


def _product(config: ParallelConfig, names: tuple[str, ...]) -> str:
    """`a x b = 2 x 3 = 6`, and for one name `a = 2`."""
    numbers = " x ".join(str(getattr(config, name)) for name in names)
    total = f" = {_value(config, names)}" if len(names) > 1 else ""
    return f"{' x '.join(names)} = {numbers}{total}"

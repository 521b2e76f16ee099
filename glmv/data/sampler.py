"""Which samples a rank reads in a step: a pure function, so that a resumed training needs no memory of it.

Samples stand in one endless row, one epoch after another. A step takes the next `global batch` of them:

    step 0                        step 1
    | a0r0 a0r1 a1r0 a1r1 |       | a0r0 ...        a: micro-batch of the accumulation, r: rank

With the same global batch, a step takes the same samples however they are spread over ranks and micro-batches.
`drop_last` leaves out the end of an epoch that does not fill a step. Without it nothing is left out: the step that an
epoch's end does not fill goes on with the next epoch. Either way every rank has the same number of batches.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from glmv.data.errors import DataError


@dataclass(frozen=True)
class BatchSampler:
    """Sample indices of one rank, step by step."""

    num_samples: int
    micro_batch_size: int
    accumulation: int
    """Micro-batches of a step."""
    dp_rank: int
    dp_size: int
    seed: int
    shuffle: bool
    drop_last: bool

    def __post_init__(self) -> None:
        if self.drop_last and self.num_samples < self.global_batch_size:
            raise DataError(
                f"{self.num_samples} samples do not fill one global batch of {self.global_batch_size} "
                f"(micro_batch_size {self.micro_batch_size} x gradient_accumulation_steps {self.accumulation} "
                f"x {self.dp_size} data-parallel ranks), and drop_last leaves out what does not fill one.\n"
                "Add samples, make the batch smaller, or set data.dataloader_param.drop_last to false."
            )

    @property
    def global_batch_size(self) -> int:
        """Samples of one step over all ranks."""
        return self.micro_batch_size * self.accumulation * self.dp_size

    def step(self, index: int) -> list[list[int]]:
        """This rank's micro-batches of step `index` (from 0), each a list of sample indices."""
        chosen = self._global_batch(index)
        first = range(0, self.global_batch_size, self.micro_batch_size)
        mine = list(first)[self.dp_rank :: self.dp_size]
        return [chosen[start : start + self.micro_batch_size] for start in mine]

    def _global_batch(self, index: int) -> list[int]:
        size = self.global_batch_size
        used = self.num_samples // size * size if self.drop_last else self.num_samples  # samples of an epoch
        places = (divmod(place, used) for place in range(index * size, (index + 1) * size))
        return [self._order(epoch)[within] for epoch, within in places]

    def _order(self, epoch: int) -> Sequence[int]:
        """The order of samples in an epoch; the same on every rank."""
        return _shuffled(self.num_samples, self.seed, epoch) if self.shuffle else range(self.num_samples)


@lru_cache(maxsize=2)  # the epoch that ends in a step, and the one that begins
def _shuffled(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    # A digest, so that seed s in epoch e + 1 is not seed s + 1 in epoch e.
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return tuple(torch.randperm(count, generator=generator).tolist())

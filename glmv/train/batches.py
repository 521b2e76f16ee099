"""Where a run's micro-batches come from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from glmv.config import Config
from glmv.data import Batch, BatchSampler, collate, load_samples
from glmv.parallel.mesh import Sizes
from glmv.parallel.process import Process


class Batches(Protocol):
    """This rank's micro-batches, step by step."""

    def step(self, step: int) -> list[Batch]:
        """Those of step `step`, counted from 0: as many on every rank as the config accumulates."""
        ...

    def __str__(self) -> str:
        """One line for the log."""
        ...


class SampledBatches:
    """The config's data set, in an order that follows from seed and step alone.

    Raises:
        GlmvError: the data cannot be read or holds too few samples.
    """

    def __init__(self, config: Config, process: Process) -> None:
        training, loader = config.training, config.data.dataloader_param
        # Ranks that share sequences read the same samples.
        sharers = Sizes.of(config.parallel, process.world_size).sharers
        self.samples = load_samples(
            config.data, Path(config.data.dataset_param.preprocess_parameters.model_name_or_path)
        )
        self.pin_memory = loader.pin_memory and process.device.type != "cpu"
        self.sampler = BatchSampler(
            len(self.samples),
            micro_batch_size=training.micro_batch_size,
            accumulation=training.gradient_accumulation_steps,
            dp_rank=process.rank // sharers,
            dp_size=process.world_size // sharers,
            seed=training.seed,
            shuffle=loader.shuffle,
            drop_last=loader.drop_last,
        )

    def step(self, step: int) -> list[Batch]:
        """Collated, and in page-locked memory if the config asks for it."""
        return [self._batch(indices) for indices in self.sampler.step(step)]

    def __str__(self) -> str:
        return f"{len(self.samples)} samples ({len(self.samples.dropped)} dropped)"

    def _batch(self, indices: list[int]) -> Batch:
        batch = collate([self.samples[index] for index in indices], self.samples.pad_token_id)
        if not self.pin_memory:
            return batch
        # From page-locked memory the batch travels while the host goes on.
        pinned: dict[str, Any] = {
            name: value.pin_memory() for name, value in vars(batch).items() if isinstance(value, Tensor)
        }
        return dataclasses.replace(batch, **pinned)

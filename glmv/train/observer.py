"""What a run shows to whoever watches it: verification, profiling, tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glmv.data.batch import Batch
    from glmv.train.metrics import StepMetrics
    from glmv.train.trainer import Trainer


class Observer:
    """Hooks into the loop, called on every rank; a subclass overrides those it needs.

    `step` counts from 1: it is the iteration of the log line, of metrics.jsonl and of checkpoint names.
    """

    def before_step(self, trainer: Trainer, step: int, micro_batches: Sequence[Batch]) -> None:
        """Weights, optimizer state and this rank's batches are final; nothing of the step has run."""

    def after_backward(self, trainer: Trainer, step: int, loss: float) -> None:
        """All gradients are complete and reduced, and not yet clipped. `loss` is the global one."""

    def after_step(self, trainer: Trainer, step: int, metrics: StepMetrics) -> None:
        """Weights are updated; gradients are still there, as clipped."""

"""The learning rate of every step.

With N steps, peak `lr`, W = int(N * warmup_ratio) and D = int(N * decay_ratio), step n (counted from 0) uses

    n < W             lr_start + (lr - lr_start) * n / W
    constant          lr
    n > D             lr_min
    otherwise, with p = (n - W) / max(1, D - W)
      linear          lr_min + (lr - lr_min) * (1 - p)
      cosine          lr_min + (lr - lr_min) * (1 + cos(pi * p)) / 2

Source: MindSpeed-MM's `fsdp/optimizer/lr_scheduler.py`. Two places differ: there `linear` ignores `lr_min` and
`decay_ratio`, and a warm-up longer than the decay span stops the run; here `lr_min` follows the warm-up at once.
With `lr_start` 0 the first warm-up step has learning rate 0 by that formula. A run of one step has no warm-up: it would
learn nothing.
"""

import math
from dataclasses import dataclass
from typing import Literal, Self

from glmv.config.training import TrainingConfig


@dataclass(frozen=True)
class Schedule:
    """A pure function of the step: nothing in it can be lost on resume or advanced twice."""

    train_iters: int
    lr: float
    style: Literal["constant", "linear", "cosine"] = "constant"
    warmup_ratio: float = 0.0
    decay_ratio: float = 1.0
    lr_start: float = 0.0
    lr_min: float = 0.0

    @classmethod
    def from_config(cls, training: TrainingConfig) -> Self:
        """The schedule that `training.lr*` and `training.train_iters` describe."""
        return cls(
            train_iters=training.train_iters,
            lr=training.lr,
            style=training.lr_decay_style,
            warmup_ratio=training.lr_warmup_ratio,
            decay_ratio=training.lr_decay_ratio,
            lr_start=training.lr_start,
            lr_min=training.lr_min,
        )

    def lr_at(self, step: int) -> float:
        """The learning rate that optimizer step `step` (0-based) uses."""
        warmup = int(self.train_iters * self.warmup_ratio) if self.train_iters > 1 else 0
        if step < warmup:
            return self.lr_start + (self.lr - self.lr_start) * step / warmup
        if self.style == "constant":
            return self.lr
        decay = int(self.train_iters * self.decay_ratio)
        if step > decay:
            return self.lr_min
        progress = (step - warmup) / max(1, decay - warmup)
        factor = 1 - progress if self.style == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.lr_min + (self.lr - self.lr_min) * factor

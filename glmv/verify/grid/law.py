"""What the law says of a step over some of the grid's micro-batches; each is computed once for each policy."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from glmv.verify.grid.batches import law_batch
from spec.config import Config
from spec.model import forward
from spec.numerics import Policy
from spec.train import Contribution, Objective, contribution

Choices = Mapping[int, Tensor]


@dataclass(frozen=True, eq=False)
class Law:
    """Loss and gradients of any list of micro-batches under these weights."""

    weights: Mapping[str, Tensor]
    config: Config

    @classmethod
    def read(cls, directory: Path) -> Law:
        """The law of a Hugging Face directory."""
        weights = {k: w for f in sorted(directory.glob("*.safetensors")) for k, w in load_file(f).items()}
        return cls(weights, Config.from_hf(json.loads((directory / "config.json").read_text(encoding="utf-8"))))

    def of(
        self, names: Sequence[str], choices: Sequence[Choices] | None = None, loss_type: str = "per_token_loss"
    ) -> Callable[[Policy], dict[str, Tensor]]:
        """A law for the judge: the loss of a step over these micro-batches, and its gradient for every weight.

        Args:
            choices: experts [T, K] by layer for each micro-batch, instead of the law's own.
        """
        pins = [_frozen(choice) for choice in choices or [{} for _ in names]]
        targets = Objective.of([law_batch(name) for name in names]).targets
        divisor = targets if loss_type == "per_token_loss" else len(names)

        def law(policy: Policy) -> dict[str, Tensor]:
            setting = policy.compute, policy.draw, loss_type
            parts = [self._part(name, *setting, pin) for name, pin in zip(names, pins, strict=True)]
            gradients = {k: torch.stack([p.gradients[k] for p in parts]).sum(0) / divisor for k in parts[0].gradients}
            return {"loss": torch.stack([part.loss for part in parts]).sum() / divisor, **gradients}

        return law

    def outputs(self, name: str, choices: Choices, policy: Policy) -> dict[str, Tensor]:
        """What each module returns on a micro-batch, in the order of the forward pass."""
        record: dict[str, Tensor] = {}
        logits = forward(self.weights, self.config, law_batch(name), policy, choices, record).logits
        return {**record, "lm_head": logits}

    @functools.cache  # noqa: B019 - a law lives as long as the tests that ask it
    def _part(
        self, name: str, compute: torch.dtype, draw: int | None, loss_type: str, pin: tuple[tuple[int, object], ...]
    ) -> Contribution:
        """One micro-batch's part, but for the divisor that all parts of a step have in common."""
        pinned = {layer: torch.tensor(index) for layer, index in pin}
        alone = Objective(loss_type, targets=1, micro_batches=1)
        policy = Policy(compute, draw=draw)
        return contribution(self.weights, law_batch(name), alone, self.config, policy, pinned)


def _frozen(choices: Choices) -> tuple[tuple[int, object], ...]:
    return tuple((layer, tuple(map(tuple, index_TK.tolist()))) for layer, index_TK in choices.items())

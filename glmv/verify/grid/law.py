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
from glmv.verify.judge import DRAWS, Noise
from spec.config import Config
from spec.model import forward
from spec.numerics import Policy
from spec.router import Routing
from spec.train import Contribution, Objective, contribution

Choices = Mapping[int, Tensor]
Pin = tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]


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

    def reference(
        self, names: Sequence[str], choices: Sequence[Choices], loss_type: str, dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], Noise]:
        """The truth in float64, and what noise draws in `dtype` did to it; kept for the next layout that asks."""
        return self._reference(tuple(names), tuple(map(_frozen, choices)), loss_type, dtype)

    @functools.lru_cache(maxsize=32)  # noqa: B019 - a law lives as long as the tests that ask it
    def _reference(
        self, names: tuple[str, ...], pins: tuple[Pin, ...], loss_type: str, dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], Noise]:
        law = self.of(names, [_thawed(pin) for pin in pins], loss_type)
        truth, noise = law(Policy(torch.float64)), Noise()
        for draw in range(DRAWS):
            noise.add(truth, law(Policy(dtype, draw=draw)))
        return truth, noise

    def routing(
        self, name: str, choices: Choices, loss_type: str, dtype: torch.dtype
    ) -> tuple[dict[int, Routing], list[dict[int, Routing]]]:
        """A micro-batch's routing by layer: the truth, and noise draws of it in `dtype`."""
        policies = [(torch.float64, None), *((dtype, draw) for draw in range(DRAWS))]
        truth, *draws = (self._part(name, *policy, loss_type, _frozen(choices)).routing for policy in policies)
        return truth, draws

    def real_tokens(self, name: str) -> Tensor:
        """Which tokens of a micro-batch are no padding, bool [B * S]."""
        return law_batch(name).attention_mask.flatten() != 0

    def outputs(self, name: str, choices: Choices, policy: Policy) -> dict[str, Tensor]:
        """What each module returns on a micro-batch, in the order of the forward pass."""
        record: dict[str, Tensor] = {}
        logits = forward(self.weights, self.config, law_batch(name), policy, choices, record).logits
        return {**record, "lm_head": logits}

    @functools.lru_cache(maxsize=160)  # noqa: B019
    def _part(self, name: str, compute: torch.dtype, draw: int | None, loss_type: str, pin: Pin) -> Contribution:
        """One micro-batch's part, but for the divisor that all parts of a step have in common."""
        alone = Objective(loss_type, targets=1, micro_batches=1)
        policy = Policy(compute, draw=draw)
        return contribution(self.weights, law_batch(name), alone, self.config, policy, _thawed(pin))


def _frozen(choices: Choices) -> Pin:
    return tuple((layer, tuple(map(tuple, index_TK.tolist()))) for layer, index_TK in sorted(choices.items()))


def _thawed(pin: Pin) -> dict[int, Tensor]:
    return {layer: torch.tensor(index) for layer, index in pin}

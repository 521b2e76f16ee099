"""One training step: loss and gradients of all micro-batches of all ranks, clipping, AdamW."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec.config import Config
from spec.loss import count_targets, summed_cross_entropy
from spec.model import Batch, forward
from spec.numerics import Policy
from spec.optimizer import Hyper, State, adamw, clip, grad_norm
from spec.router import Routing

BUFFER = "e_score_correction_bias"


@dataclass(frozen=True)
class Contribution:
    """What one micro-batch adds to the step: its part of the loss, of every gradient, and its routing by layer."""

    loss: Tensor
    gradients: dict[str, Tensor]
    routing: dict[int, Routing]


@dataclass(frozen=True)
class Step:
    """Everything that one step determines; gradients before clipping."""

    loss: Tensor
    gradients: dict[str, Tensor]
    grad_norm: Tensor
    clipped: dict[str, Tensor]
    weights: dict[str, Tensor]
    state: State


def is_trainable(name: str) -> bool:
    """Every published tensor is trained but the router's correction bias, which is a buffer."""
    return not name.endswith(BUFFER)


def contribution(
    weights: Mapping[str, Tensor],
    batch: Batch,
    targets: int,
    config: Config,
    policy: Policy,
    pinned: Mapping[int, Tensor] | None = None,
    trainable: Callable[[str], bool] = is_trainable,
) -> Contribution:
    """Loss and gradients of one micro-batch under `per_token_loss`.

    Args:
        weights: master weights; each use rounds them to the policy's compute dtype.
        targets: number of positions with a target in the whole global batch: the only divisor of the step.
    Returns:
        Gradients in the wide dtype; zeros for weights that this micro-batch does not use.
    """
    masters = {name: policy.widen(w).detach() for name, w in weights.items()}
    leaves = {name: w.requires_grad_() for name, w in masters.items() if trainable(name)}
    output = forward(masters, config, batch, policy, pinned)
    assert batch.labels is not None, "a training micro-batch has labels"
    loss = summed_cross_entropy(output.logits, batch.labels, policy) / max(targets, 1)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(w) if g is None else g for (name, w), g in zip(leaves.items(), found, strict=True)
    }
    routing = {layer: choice.detach() for layer, choice in output.routing.items()}
    return Contribution(loss.detach(), gradients, routing)


def step(
    weights: Mapping[str, Tensor],
    state: State,
    micro_batches: Sequence[Batch],
    hyper: Hyper,
    *,
    config: Config,
    policy: Policy,
    pinned: Sequence[Mapping[int, Tensor]] | None = None,
    trainable: Callable[[str], bool] = is_trainable,
) -> Step:
    """The whole step. Loss and gradients of the micro-batches are summed; the divisor already stands in each loss.

    Args:
        micro_batches: all of them, over ranks and accumulation; how they are spread changes nothing.
        pinned: expert choices per micro-batch.
    """
    targets = sum(count_targets(batch.labels) for batch in micro_batches if batch.labels is not None)
    choices = pinned or [{}] * len(micro_batches)
    parts = [
        contribution(weights, batch, targets, config, policy, choice, trainable)
        for batch, choice in zip(micro_batches, choices, strict=True)
    ]
    gradients = {name: torch.stack([part.gradients[name] for part in parts]).sum(0) for name in parts[0].gradients}
    norm = grad_norm(gradients)
    clipped = clip(gradients, norm, hyper.clip_grad)
    masters = {name: policy.widen(w) for name, w in weights.items()}
    new, new_state = adamw(masters, clipped, state, hyper)
    loss = torch.stack([part.loss for part in parts]).sum()
    return Step(loss, gradients, norm, clipped, {**masters, **new}, new_state)

"""One training step: loss and gradients of all micro-batches of all ranks, clipping, AdamW."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec.config import Config
from spec.loss import count_targets, cross_entropy, next_token_targets, shares
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


@dataclass(frozen=True)
class Objective:
    """What the whole step minimises: the loss type, and the two numbers of the step that its shares need."""

    loss_type: str
    targets: int
    micro_batches: int

    @classmethod
    def of(cls, micro_batches: Sequence[Batch], loss_type: str = "per_token_loss") -> Objective:
        """The objective of a step over these micro-batches, of all ranks."""
        pairs = [(batch.labels, batch.documents) for batch in micro_batches if batch.labels is not None]
        return cls(loss_type, count_targets(pairs), len(micro_batches))


def contribution(
    weights: Mapping[str, Tensor],
    batch: Batch,
    objective: Objective,
    config: Config,
    policy: Policy,
    pinned: Mapping[int, Tensor] | None = None,
    trainable: Callable[[str], bool] = is_trainable,
) -> Contribution:
    """Loss and gradients of one micro-batch.

    Args:
        weights: master weights; each use rounds them to the policy's compute dtype.
    Returns:
        Gradients in the wide dtype; zeros for weights that this micro-batch does not use.
    """
    masters = {name: policy.widen(w).detach() for name, w in weights.items()}
    leaves = {name: w.requires_grad_() for name, w in masters.items() if trainable(name)}
    output = forward(masters, config, batch, policy, pinned)
    assert batch.labels is not None, "a training micro-batch has labels"
    target_BS = next_token_targets(batch.labels, batch.documents)
    share_BS = shares(target_BS, batch.documents, objective.loss_type, objective.targets, objective.micro_batches)
    loss = cross_entropy(output.logits, target_BS, share_BS, policy)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(leaves.items(), found, strict=True)
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
    loss_type: str = "per_token_loss",
    pinned: Sequence[Mapping[int, Tensor]] | None = None,
    trainable: Callable[[str], bool] = is_trainable,
) -> Step:
    """The whole step. Loss and gradients of the micro-batches are summed; every divisor already stands in the loss.

    A step whose loss or gradient norm is not finite is not taken: weights and state stay as they were.

    Args:
        micro_batches: all of them, over ranks and accumulation; how they are spread changes nothing.
        pinned: expert choices per micro-batch.
    """
    objective, choices = Objective.of(micro_batches, loss_type), pinned or [{}] * len(micro_batches)
    parts = [
        contribution(weights, batch, objective, config, policy, choice, trainable)
        for batch, choice in zip(micro_batches, choices, strict=True)
    ]
    gradients = {name: torch.stack([part.gradients[name] for part in parts]).sum(0) for name in parts[0].gradients}
    loss, norm = torch.stack([part.loss for part in parts]).sum(), grad_norm(gradients)
    masters = {name: policy.widen(w) for name, w in weights.items()}
    if not (loss.isfinite() and norm.isfinite()):
        return Step(loss, gradients, norm, gradients, masters, state)
    clipped = clip(gradients, norm, hyper.clip_grad)
    new, new_state = adamw(masters, clipped, state, hyper)
    return Step(loss, gradients, norm, clipped, {**masters, **new}, new_state)

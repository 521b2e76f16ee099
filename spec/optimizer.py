"""One optimizer update: global gradient clipping, AdamW, and the learning rate of a step.

Source: Pascanu et al. (arXiv 1211.5063) for clipping; Loshchilov and Hutter (arXiv 1711.05101) for AdamW with decoupled
decay; config keys `training.clip_grad`, `lr*`, `weight_decay`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Hyper:
    """What an update uses besides weights and gradients."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 0.0


@dataclass(frozen=True)
class State:
    """AdamW's memory after `step` updates."""

    step: int
    exp_avg: Tensors
    exp_avg_sq: Tensors

    @classmethod
    def zeros(cls, weights: Tensors) -> State:
        """Before the first update."""
        return cls(0, *({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2)))


@dataclass(frozen=True)
class Schedule:
    """`training.lr_*`: linear warm-up, then constant, linear or cosine decay."""

    lr: float
    train_iters: int
    lr_min: float = 0.0
    lr_start: float = 0.0
    lr_warmup_ratio: float = 0.0
    lr_decay_style: str = "constant"
    lr_decay_ratio: float = 1.0


def learning_rate(step: int, schedule: Schedule) -> float:
    """Learning rate of the update number `step`, counted from 0.

    With a warm-up, update 0 uses `lr_start`. A run of a single update has none: it would learn nothing.
    """
    warmup = int(schedule.train_iters * schedule.lr_warmup_ratio) if schedule.train_iters > 1 else 0
    if step < warmup:
        return schedule.lr_start + (schedule.lr - schedule.lr_start) * step / warmup
    if schedule.lr_decay_style == "constant":
        return schedule.lr
    end = int(schedule.train_iters * schedule.lr_decay_ratio)
    if step > end:
        return schedule.lr_min
    progress = (step - warmup) / max(1, end - warmup)
    remaining = (1 + math.cos(math.pi * progress)) / 2 if schedule.lr_decay_style == "cosine" else 1 - progress
    return schedule.lr_min + (schedule.lr - schedule.lr_min) * remaining


def grad_norm(gradients: Tensors) -> Tensor:
    """Euclidean norm of all gradients together."""
    return torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt()


def clip(gradients: Tensors, norm: Tensor, max_norm: float) -> dict[str, Tensor]:
    """Gradients scaled so that their norm is at most `max_norm`; 0 leaves them as they are."""
    factor = min(1.0, max_norm / (float(norm) + 1e-6)) if max_norm > 0 else 1.0
    return {name: g * factor for name, g in gradients.items()}


def adamw(weights: Tensors, gradients: Tensors, state: State, hyper: Hyper) -> tuple[dict[str, Tensor], State]:
    """New weights and state. Every weight with a gradient is stepped, a zero gradient included."""
    step = state.step + 1
    new, first, second = {}, {}, {}
    for name, g in gradients.items():
        first[name] = m = hyper.beta1 * state.exp_avg[name] + (1 - hyper.beta1) * g
        second[name] = v = hyper.beta2 * state.exp_avg_sq[name] + (1 - hyper.beta2) * g.square()
        m_hat, v_hat = m / (1 - hyper.beta1**step), v / (1 - hyper.beta2**step)
        decayed = weights[name] * (1 - hyper.lr * hyper.weight_decay)
        new[name] = decayed - hyper.lr * m_hat / (v_hat.sqrt() + hyper.eps)
    return new, State(step, first, second)

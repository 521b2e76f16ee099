"""The training loss: cross entropy of the next token."""

# Shapes: B batch, S sequence, V vocabulary.

from __future__ import annotations

import torch
from torch import Tensor

from spec.numerics import Policy

IGNORED = -100


def next_token_targets(labels_BS: Tensor) -> Tensor:
    """What position i must predict: the label at i + 1; nothing at the last position."""
    return torch.cat([labels_BS[:, 1:], torch.full_like(labels_BS[:, :1], IGNORED)], 1)


def count_targets(labels_BS: Tensor) -> int:
    """How many positions have something to predict."""
    return int((next_token_targets(labels_BS) != IGNORED).sum())


def summed_cross_entropy(logits_BSV: Tensor, labels_BS: Tensor, policy: Policy) -> Tensor:
    """-log p(target) in the wide dtype, summed over the positions that have a target."""
    target_BS = next_token_targets(labels_BS)
    counted_BS = target_BS != IGNORED
    log_p_TV = policy.widen(logits_BSV)[counted_BS].log_softmax(-1)
    return -log_p_TV.gather(-1, target_BS[counted_BS][:, None]).sum()

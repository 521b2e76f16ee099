"""The training loss: cross entropy of the next token, and what each token's share of it is.

Every loss type is a sum over all tokens of the step of (share x cross entropy); they differ in the shares alone. R is
the number of data-parallel ranks and A that of micro-batches per rank and step:

    per_token_loss    1 / targets of the whole global batch
    default, raw      1 / targets of the micro-batch / (A R)     the mean of micro-batch means
    per_sample_loss   1 / targets of the token's document / documents of the micro-batch / (A R)

A micro-batch or document without targets contributes 0 and still counts as one. Config key: `loss_cfg.loss_type`.
"""

# Shapes: B batch, S sequence, V vocabulary.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec.numerics import Policy

IGNORED = -100
LOSS_TYPES = ("per_token_loss", "default", "per_sample_loss", "raw")


def next_token_targets(labels_BS: Tensor, document_BS: Tensor) -> Tensor:
    """What position i must predict: the label at i + 1, if that belongs to the same document."""
    target_BS = torch.full_like(labels_BS, IGNORED)
    same_BS = (document_BS[:, 1:] == document_BS[:, :-1]) & (document_BS[:, :-1] >= 0)
    target_BS[:, :-1] = labels_BS[:, 1:].masked_fill(~same_BS, IGNORED)
    return target_BS


def shares(target_BS: Tensor, document_BS: Tensor, loss_type: str, targets: int, micro_batches: int) -> Tensor:
    """Share of every token of one micro-batch in the step's loss, [B, S] float64.

    Args:
        targets: positions with a target in the whole global batch.
        micro_batches: how many the step has, over all ranks.
    """
    counted_BS = (target_BS != IGNORED).double()
    if loss_type == "per_token_loss":
        return counted_BS / max(targets, 1)
    if loss_type in ("default", "raw"):
        return counted_BS / counted_BS.sum().clamp(min=1) / micro_batches
    if loss_type != "per_sample_loss":
        raise ValueError(f"loss_type {loss_type!r} is none of {LOSS_TYPES}")
    share_BS, documents = torch.zeros_like(counted_BS), 0
    for row, document_S in enumerate(document_BS):
        for document in document_S[document_S >= 0].unique():
            own_S = counted_BS[row] * (document_S == document)
            share_BS[row] += own_S / own_S.sum().clamp(min=1)
            documents += 1
    return share_BS / max(documents, 1) / micro_batches


def cross_entropy(logits_BSV: Tensor, target_BS: Tensor, share_BS: Tensor, policy: Policy) -> Tensor:
    """Sum of share x -log p(target) in the wide dtype, over the positions that have a target."""
    counted_BS = target_BS != IGNORED
    log_p_TV = policy.widen(logits_BSV)[counted_BS].log_softmax(-1)
    loss_T = -log_p_TV.gather(-1, target_BS[counted_BS][:, None]).squeeze(-1)
    return (loss_T * policy.widen(share_BS)[counted_BS]).sum()


def count_targets(batches: Sequence[tuple[Tensor, Tensor]]) -> int:
    """Positions with something to predict, over (labels, documents) of all micro-batches."""
    return sum(int((next_token_targets(labels, documents) != IGNORED).sum()) for labels, documents in batches)

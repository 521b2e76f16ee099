"""The training loss: cross entropy of the next token, and what each token's share of it is.

Every loss type is a sum over all tokens of a step of (share x cross entropy), and they differ in the shares alone. All
divisors stand in the shares, so losses and gradients of micro-batches and ranks are summed. A step has A micro-batches
on each of R data-parallel ranks:

    per_token_loss    1 / targets of the whole global batch
    default, raw      1 / targets of the micro-batch / (A R)     the mean of micro-batch means
    per_sample_loss   1 / targets of the token's document / documents of the micro-batch / (A R)

A micro-batch or document without targets contributes 0 and still counts as one.
"""
# Shapes: B batch, S sequence, V vocab, T real tokens, D documents.

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from glmv.ops.precision import at_least_fp32

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Objective:
    """What a step minimises.

    Attributes:
        loss_type: `features.loss_cfg.loss_type`.
        targets: positions with a target in the whole global batch.
        micro_batches: how many the step has, over all data-parallel ranks.
    """

    loss_type: str
    targets: int
    micro_batches: int


def unpredictable_ignored(labels_BS: Tensor, document_BS: Tensor) -> Tensor:
    """Labels of which each has a token of its own document before it; the others, and padding, become -100.

    Nobody predicts the first token of a document: before it stands another document, padding, or nothing.

    Args:
        labels_BS: int64, unshifted.   document_BS: from `glmv.ops.documents.document_ids`.
    """
    before_BS = F.pad(document_BS[:, :-1], (1, 0), value=-1)
    return labels_BS.masked_fill((document_BS != before_BS) | (document_BS < 0), IGNORE_INDEX)


def shift(labels_BS: Tensor) -> Tensor:
    """Targets of each position: the next label; the last position has none.

    The labels move, not the logits: no copy of a [B, S-1, V] slice.
    """
    return F.pad(labels_BS[:, 1:], (0, 1), value=IGNORE_INDEX)


def count_targets(labels_BS: Tensor) -> Tensor:
    """How many positions have a target, as an int64 scalar tensor on the labels' device."""
    return (shift(labels_BS) != IGNORE_INDEX).sum()


def shares(labels_BS: Tensor, document_BS: Tensor, objective: Objective) -> Tensor:
    """Each position's share of the step's loss, [B, S] float64 on the labels' device; 0 where there is no target.

    Args:
        labels_BS: int64, unshifted, as `unpredictable_ignored` leaves them.
        document_BS: which document a token belongs to, -1 at padding.
    Raises:
        ValueError: an unknown loss type.
    """
    counted_BS = (shift(labels_BS) != IGNORE_INDEX).double()
    if objective.loss_type == "per_token_loss":
        return counted_BS / max(objective.targets, 1)
    if objective.loss_type in ("default", "raw"):
        return counted_BS / counted_BS.sum().clamp(min=1) / objective.micro_batches
    if objective.loss_type == "per_sample_loss":
        return _means_of_documents(counted_BS, document_BS) / objective.micro_batches
    raise ValueError(f"loss_type = {objective.loss_type!r} is unknown")


def _means_of_documents(counted_BS: Tensor, document_BS: Tensor) -> Tensor:
    """Shares that make the mean over documents of each one's mean over its targets."""
    real_BS = document_BS >= 0
    row_BS = torch.arange(len(document_BS), device=document_BS.device)[:, None].expand_as(document_BS)
    documents_D2, document_T = torch.stack([row_BS, document_BS], -1)[real_BS].unique(dim=0, return_inverse=True)
    counted_T, documents = counted_BS[real_BS], max(len(documents_D2), 1)
    targets_D = counted_T.new_zeros(documents).index_add(0, document_T, counted_T)
    share_T = counted_T / targets_D.clamp(min=1)[document_T] / documents
    return torch.zeros_like(counted_BS).masked_scatter(real_BS, share_T)


def cross_entropy(logits_BSV: Tensor, labels_BS: Tensor, share_BS: Tensor) -> Tensor:
    """Sum over all targets of share x cross entropy, a scalar in fp32 (float64 for float64 logits).

    Args:
        logits_BSV: any float dtype.
        labels_BS: int64, unshifted, -100 where there is nothing to learn.
        share_BS: from `shares`, on any device.
    Returns:
        0 with a graph (and zero gradients) when no target is valid; never NaN.
    """
    return target_cross_entropy(logits_BSV, shift(labels_BS), share_BS)


def target_cross_entropy(logits_BSV: Tensor, target_BS: Tensor, share_BS: Tensor) -> Tensor:
    """`cross_entropy` of labels that are shifted already, as they must be before a sequence is split."""
    wide_NV = logits_BSV.flatten(0, 1).to(at_least_fp32(logits_BSV.dtype))
    loss_N = F.cross_entropy(wide_NV, target_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return (loss_N * share_BS.flatten().to(wide_NV.dtype).to(wide_NV.device)).sum()

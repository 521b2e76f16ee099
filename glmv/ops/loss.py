"""Next-token cross-entropy as a sum; who divides, and by what, is the trainer's business."""
# Shapes: B batch, S sequence, V vocab.

import torch.nn.functional as F
from torch import Tensor

from glmv.ops.precision import at_least_fp32

IGNORE_INDEX = -100


def shift(labels_BS: Tensor) -> Tensor:
    """Targets of each position: the next label; the last position has none.

    The labels move, not the logits: no copy of a [B, S-1, V] slice.
    """
    return F.pad(labels_BS[:, 1:], (0, 1), value=IGNORE_INDEX)


def count_targets(labels_BS: Tensor) -> Tensor:
    """How many positions have a target, as an int64 scalar tensor on the labels' device."""
    return (shift(labels_BS) != IGNORE_INDEX).sum()


def token_cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Sum over all valid targets of the cross-entropy, a scalar in fp32 (float64 for float64 logits).

    Args:
        logits_BSV: any float dtype.
        labels_BS: int64, unshifted, -100 where there is nothing to learn.
    Returns:
        0 with a graph (and zero gradients) when no target is valid; never NaN.
    """
    wide_NV = logits_BSV.flatten(0, 1).to(at_least_fp32(logits_BSV.dtype))
    return F.cross_entropy(wide_NV, shift(labels_BS).flatten(), ignore_index=IGNORE_INDEX, reduction="sum")

"""Which document each token belongs to: a padded row is one document, a packed row holds several."""
# Shapes: B batch, S sequence.

import torch
from torch import Tensor

PADDING = -1


def document_ids(attention_mask_BS: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Number of each token's document within its row, [B, S] int64; -1 (`PADDING`) at padding.

    Args:
        attention_mask_BS: 0 at padding.
        cu_seqlens: int32 [documents + 1], for a batch of one packed row: document d is at cu_seqlens[d] to
            cu_seqlens[d + 1], and what stands behind the last of them is padding. None: a row is one document.
    """
    if cu_seqlens is None:
        return (attention_mask_BS != 0).long() - 1
    place_S = torch.arange(attention_mask_BS.shape[1], device=cu_seqlens.device)
    document_S = torch.bucketize(place_S, cu_seqlens.long(), right=True) - 1
    return document_S.masked_fill(place_S >= cu_seqlens[-1], PADDING)[None]

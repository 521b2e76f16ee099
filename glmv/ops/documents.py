"""Which document each token belongs to: a padded row is one document, a packed row holds several."""
# Shapes: B batch, S sequence.

import torch
import torch.nn.functional as F
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
    lengths = cu_seqlens.diff()
    document_S = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    return F.pad(document_S, (0, attention_mask_BS.shape[1] - len(document_S)), value=PADDING)[None]

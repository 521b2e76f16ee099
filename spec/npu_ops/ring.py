"""Merging the attention of the same queries over two sets of keys (ring attention, arXiv 2310.01889).

Source: op-plugin's checks of npu_ring_attention_update and the documentation of aclnnRingAttentionUpdate.
"""

# Shapes: S sequence, B batch, H = N*D, N heads, T tokens of all sequences.

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from spec.npu_ops.attention_blocks import cut_tnd_statistics
from spec.npu_ops.contract import Call, Contract, wide
from spec.npu_ops.refuse import FLOATS, refuse_if

# In layout TND the kernel moves heads in pieces of this many elements.
PIECE = 64


def ring_attention_update(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    *,
    actual_seq_qlen: Tensor | None = None,
    input_layout: str = "SBH",
    input_softmax_layout: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, maxima and sums over both sets of keys; float32 inside. NOT differentiable.

    Args:
        prev_attn_out, cur_attn_out: [S, B, H] or [T, N, D].
        prev_softmax_max and so on: float32 [B, N, S, 8] or [T, N, 8] as npu_fusion_attention returns them.
        actual_seq_qlen: with TND int64 cumulative lengths WITH leading zero, on the device.
        input_softmax_layout: with TND, "TND" if the statistics are ordered by token, else sequence by sequence.
    """
    maximum = torch.maximum(prev_softmax_max, cur_softmax_max)
    prev_total = (prev_softmax_max - maximum).exp() * prev_softmax_sum
    cur_total = (cur_softmax_max - maximum).exp() * cur_softmax_sum
    total = prev_total + cur_total
    dtype = wide(prev_attn_out)
    merged = torch.zeros_like(prev_attn_out, dtype=dtype)
    for output, share in ((prev_attn_out, prev_total / total), (cur_attn_out, cur_total / total)):
        weight = by_row(share[..., 0], actual_seq_qlen, input_layout, input_softmax_layout)
        merged += (output.to(dtype).unflatten(-1, (weight.size(-1), -1)) * weight[..., None]).view_as(merged)
    return merged.to(prev_attn_out.dtype), maximum, total


def by_row(share: Tensor, lengths: Tensor | None, layout: str, softmax_layout: str) -> Tensor:
    """One number per row and head, [S, B, N] or [T, N, 1] (a row of TND holds a single head's D)."""
    if layout == "SBH":
        return share.permute(2, 0, 1)
    if softmax_layout == "TND" or lengths is None:
        return share[..., None]
    blocks = cut_tnd_statistics(share, lengths.tolist()[1:], softmax_layout)
    return torch.cat([block[0].T for block in blocks])[..., None]


def refuse_ring_attention_update(call: Call) -> None:
    """What npu_ring_attention_update refuses."""
    layout, softmax_layout = call.input_layout, call.input_softmax_layout
    refuse_if(layout not in ("SBH", "TND"), f"input_layout only supports 'SBH' or 'TND', but got {layout}")
    refuse_if(
        softmax_layout not in ("", "SBH", "TND"),
        f"input_softmax_layout only supports '', 'SBH' or 'TND', but got {softmax_layout}",
    )
    output, other = call.prev_attn_out, call.cur_attn_out
    refuse_if(output.shape != other.shape, "prev_attn_out and cur_attn_out must have the same shape.")
    refuse_if(output.dtype != other.dtype, "prev_attn_out and cur_attn_out must have the same dtype.")
    refuse_if(
        output.dtype not in FLOATS, f"attn_out dtype only supports float16, float32 or bfloat16, but got {output.dtype}"
    )
    refuse_if(output.dim() != 3, f"prev_attn_out must be a 3D tensor, but got {output.dim()}D.")
    refuse_statistics(call)
    if layout == "TND":
        refuse_tnd(call)


def refuse_statistics(call: Call) -> None:
    """Statistics of the wrong dtype or shape."""
    output = call.prev_attn_out
    statistics = [call.prev_softmax_max, call.prev_softmax_sum, call.cur_softmax_max, call.cur_softmax_sum]
    shape = statistics[0].shape
    refuse_if(any(one.shape != shape for one in statistics), "softmax tensors must keep the same shape.")
    refuse_if(any(one.dtype != torch.float32 for one in statistics), "softmax tensors must use float32.")
    refuse_if(shape[-1] != 8, "softmax tensors require the last dimension to be 8.")
    if call.input_layout == "SBH":
        refuse_if(len(shape) != 4, "softmax tensors must be 4D when input_layout is 'SBH'.")
        fits = (shape[2], shape[0]) == tuple(output.shape[:2]) and output.size(2) % shape[1] == 0
        refuse_if(not fits, f"softmax tensors {tuple(shape)} do not fit attn_out {tuple(output.shape)}")


def refuse_tnd(call: Call) -> None:
    """What holds for layout TND alone."""
    lengths, output = call.actual_seq_qlen, call.prev_attn_out
    refuse_if(lengths is None, "actual_seq_qlen is required when input_layout is 'TND'.")
    refuse_if(call.prev_softmax_max.dim() != 3, "softmax tensors must be 3D when input_layout is 'TND'.")
    refuse_if(lengths.dtype != torch.int64, "actual_seq_qlen must use int64 dtype.")
    refuse_if(
        call.prev_softmax_max.shape[:2] != output.shape[:2],
        f"softmax tensors {tuple(call.prev_softmax_max.shape)} do not fit attn_out {tuple(output.shape)}",
    )
    refuse_if(output.size(2) % PIECE != 0, f"D = {output.size(2)} must be a multiple of {PIECE} in layout TND")
    if call.input_softmax_layout == "TND":
        return  # order is by token, and lengths are not read
    steps = lengths.tolist()
    rising = steps[:1] == [0] and steps[-1] == output.size(0) and all(a <= b for a, b in pairwise(steps))
    refuse_if(not rising, f"actual_seq_qlen must rise from 0 to {output.size(0)}, but is {steps}")


RING_ATTENTION_UPDATE = Contract("npu_ring_attention_update", ring_attention_update, refuse_ring_attention_update)

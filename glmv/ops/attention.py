"""Attention of the text decoder (causal, grouped-query, padded or packed) and of the vision tower (full in segments).

Neither ever sees position ids, so nothing can mistake them for packing: packed documents are told by their lengths.

    "eager"   the textbook
    "sdpa"    PyTorch's kernels
    "flash"   the device's own fused kernel; on the CPU and on CUDA, PyTorch chooses it: the same as "sdpa"
"""
# Shapes: B batch, N heads, S sequence, D head dim.

import logging
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from glmv.ops.precision import at_least_fp32
from glmv.ops.registry import Operator, say_once

IMPLEMENTATIONS = ("eager", "sdpa", "flash")

attention: Operator[..., Tensor] = Operator("attention")
segment_attention: Operator[..., Tensor] = Operator("segment_attention")


def causal_mask(key_mask_BS: Tensor) -> Tensor:
    """Which keys each query sees, bool [B, 1, S, S]: real ones, up to its own position.

    A query left of all real tokens sees none: its row is all False, and its attention output is zero.
    """
    sequence = key_mask_BS.shape[1]
    order_SS = torch.ones(sequence, sequence, dtype=torch.bool, device=key_mask_BS.device).tril()
    return (order_SS & key_mask_BS[:, None, :])[:, None]


@dataclass(frozen=True)
class Visible:
    """What a token of the text decoder sees besides the order of time.

    Attributes:
        mask_B1SS: from `causal_mask`; None when nothing is padded.
        documents: lengths of the documents in a single packed row, each of which sees itself only; what stands behind
            them is padding. None: no row is packed. At most one of the two is given.
    """

    mask_B1SS: Tensor | None = None
    documents: list[int] | None = None


def repeat_heads(states_BNSD: Tensor, query_heads: int) -> Tensor:
    """Each key or value head once for every query head that shares it."""
    return states_BNSD.repeat_interleave(query_heads // states_BNSD.shape[1], dim=1)


@attention.register("eager", when=lambda *tensors, implementation, causal: implementation == "eager")
def eager_attention(
    query_BNSD: Tensor,
    key_BNSD: Tensor,
    value_BNSD: Tensor,
    mask_B1SS: Tensor | None,
    *,
    implementation: str = "eager",
    causal: bool,
) -> Tensor:
    """The textbook, in fp32 and rounded once: the same rounding points as the fused kernels have."""
    wide, heads = at_least_fp32(query_BNSD.dtype), query_BNSD.shape[1]
    key_BNSD, value_BNSD = (repeat_heads(states, heads).to(wide) for states in (key_BNSD, value_BNSD))
    scores_BNSS = query_BNSD.to(wide) @ key_BNSD.transpose(2, 3) * query_BNSD.shape[-1] ** -0.5
    if mask_B1SS is None:
        sees = torch.ones(scores_BNSS.shape[-2:], dtype=torch.bool, device=scores_BNSS.device)
        mask_B1SS = sees.tril() if causal else sees
    # A softmax over nothing is NaN, in backward too: blind queries look everywhere and their result is thrown away.
    blind_B1S1 = ~mask_B1SS.any(-1, keepdim=True)
    scores_BNSS = scores_BNSS.masked_fill(~(mask_B1SS | blind_B1S1), float("-inf"))
    output_BNSD = (scores_BNSS.softmax(-1) @ value_BNSD).to(query_BNSD.dtype)
    return output_BNSD.masked_fill(blind_B1S1, 0)


@attention.register("sdpa", when=lambda *tensors, implementation, causal: implementation in ("sdpa", "flash"))
def sdpa_attention(
    query_BNSD: Tensor,
    key_BNSD: Tensor,
    value_BNSD: Tensor,
    mask_B1SS: Tensor | None,
    *,
    implementation: str = "sdpa",
    causal: bool,
) -> Tensor:
    """PyTorch's fused kernels."""
    heads = query_BNSD.shape[1]
    if implementation == "flash":
        say_once(f"attn_implementation: PyTorch's SDPA runs on {query_BNSD.device.type}", logging.INFO)
    if query_BNSD.device.type == "npu":  # where nothing promises that SDPA takes shared heads
        key_BNSD, value_BNSD = repeat_heads(key_BNSD, heads), repeat_heads(value_BNSD, heads)
    if mask_B1SS is None:
        shared = key_BNSD.shape[1] != heads
        return F.scaled_dot_product_attention(query_BNSD, key_BNSD, value_BNSD, is_causal=causal, enable_gqa=shared)
    # With a mask no memory-saving CUDA kernel takes shared heads; repeating them costs far less than S x S scores.
    key_BNSD, value_BNSD = repeat_heads(key_BNSD, heads), repeat_heads(value_BNSD, heads)
    # Kernels differ on a blind query (0, NaN, an average): let it look everywhere, then throw the result away.
    blind_B1S1 = ~mask_B1SS.any(-1, keepdim=True)
    output_BNSD = F.scaled_dot_product_attention(query_BNSD, key_BNSD, value_BNSD, attn_mask=mask_B1SS | blind_B1S1)
    return output_BNSD.masked_fill(blind_B1S1, 0)


def text_attention(
    query_BNSD: Tensor, key_BNSD: Tensor, value_BNSD: Tensor, visible: Visible, *, implementation: str
) -> Tensor:
    """Causal attention of padded rows, or of one row of packed documents; zero where a token sees nothing."""
    lengths = visible.documents
    if lengths is None:
        states = query_BNSD, key_BNSD, value_BNSD
        return attention(*states, visible.mask_B1SS, implementation=implementation, causal=True)
    end, length = sum(lengths), query_BNSD.shape[2]
    query, key, value = (states[0, :, :end] for states in (query_BNSD, key_BNSD, value_BNSD))
    output_NSD = segment_attention(query, key, value, lengths, implementation=implementation, causal=True)
    return F.pad(output_NSD, (0, 0, 0, length - end))[None]


@segment_attention.register("by_runs", when=lambda *args, **options: True)
def attention_by_runs(
    query_NSD: Tensor,
    key_NSD: Tensor,
    value_NSD: Tensor,
    lengths: list[int],
    *,
    implementation: str,
    causal: bool = False,
) -> Tensor:
    """Attention inside each consecutive segment of the sequence, none across; -> [heads, S, D].

    Args:
        lengths: tokens of each segment (an image, a temporal patch of a video, a document); they sum to S.
        causal: whether a token sees its segment only up to itself.
    """
    outputs = []
    start = 0
    for length, run in groupby(lengths):
        count = len(list(run))  # neighbours of equal length share one call, as a batch
        pieces = [
            states[:, start : start + count * length].unflatten(1, (count, length)).transpose(0, 1)
            for states in (query_NSD, key_NSD, value_NSD)
        ]
        output_BNSD = attention(*pieces, None, implementation=implementation, causal=causal)
        outputs.append(output_BNSD.transpose(0, 1).flatten(1, 2))
        start += count * length
    return torch.cat(outputs, dim=1)

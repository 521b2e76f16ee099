"""Attention by npu_fusion_attention: `attn_implementation: flash_attention_2` on an NPU.

Layout and scale are always given: the kernel guesses neither (its scale would be 1). Key and value heads that several
query heads share are not repeated.
"""
# Shapes: B batch, N heads, S sequence, T tokens of all segments, D head dim.

import functools
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from glmv.ops.attention import attention, segment_attention
from glmv.ops.npu.library import fits, on_npu, torch_npu, why_not_dtype

OPERATOR = "npu_fusion_attention"
MAX_SEGMENTS = 1024
MAX_HEAD_DIM = 768
# sparse_mode: the mask as given, or causal counted from the last query and the last key.
WHOLE_MASK, CAUSAL = 0, 3
COMPRESSED = 2048  # the side of the mask that causal mode wants, whatever the sequence


@functools.cache
def _future(device: torch.device) -> Tensor:
    """The compressed causal mask, True where a query must not look; 4 MiB, made once for each device."""
    with torch.inference_mode(False):  # else a first call in inference mode leaves a tensor that training cannot save
        return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu(1)


def why_not(query: Tensor, value: Tensor) -> str | None:
    """Why the kernel does not take these tensors; None if it does."""
    if query.shape[-1] > MAX_HEAD_DIM:
        return f"head dim {query.shape[-1]} is larger than {MAX_HEAD_DIM}"
    return why_not_dtype(query, value)


def can_attend(
    query_BNSD: Tensor,
    key_BNSD: Tensor,
    value_BNSD: Tensor,
    mask_B1SS: Tensor | None,
    *,
    implementation: str,
    causal: bool,
) -> bool:
    """Whether the device's fused kernel was asked for and takes these tensors."""
    if not (on_npu(query_BNSD) and implementation == "flash"):
        return False
    return fits(OPERATOR, why_not(query_BNSD, value_BNSD))


@attention.register("npu", when=can_attend)
def attention_npu(
    query_BNSD: Tensor,
    key_BNSD: Tensor,
    value_BNSD: Tensor,
    mask_B1SS: Tensor | None,
    *,
    implementation: str = "flash",
    causal: bool,
) -> Tensor:
    """Rows of a batch; a mask says all that a query sees, and a query that sees nothing gives zero."""
    states = query_BNSD, key_BNSD, value_BNSD
    if mask_B1SS is None:
        return _fused(*states, "BNSD", **sight(causal, query_BNSD.device))
    # The kernel promises nothing for a blind query: it looks everywhere, and its result is thrown away.
    blind_B1S1 = ~mask_B1SS.any(-1, keepdim=True)
    hidden_B1SS = ~(mask_B1SS | blind_B1S1)
    output_BNSD = _fused(*states, "BNSD", atten_mask=hidden_B1SS, sparse_mode=WHOLE_MASK)
    return output_BNSD.masked_fill(blind_B1S1, 0)


def can_attend_in_segments(
    query_NSD: Tensor,
    key_NSD: Tensor,
    value_NSD: Tensor,
    lengths: list[int],
    *,
    implementation: str,
    causal: bool = False,
) -> bool:
    """Whether one call of the device's fused kernel was asked for and takes these segments."""
    if not (on_npu(query_NSD) and implementation == "flash"):
        return False
    why = why_not(query_NSD, value_NSD)
    if len(lengths) > MAX_SEGMENTS:
        why = why or f"{len(lengths)} segments are more than {MAX_SEGMENTS}"
    return fits(f"{OPERATOR} (TND)", why)


@segment_attention.register("npu", when=can_attend_in_segments)
def segment_attention_npu(
    query_NSD: Tensor,
    key_NSD: Tensor,
    value_NSD: Tensor,
    lengths: list[int],
    *,
    implementation: str = "flash",
    causal: bool = False,
) -> Tensor:
    """All segments in one call, told by where each ends: numbers that the host has, so nothing is synchronised."""
    ends = list(accumulate(lengths))
    query_TND, key_TND, value_TND = (states.transpose(0, 1) for states in (query_NSD, key_NSD, value_NSD))
    options = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends, **sight(causal, query_NSD.device)}
    return _fused(query_TND, key_TND, value_TND, "TND", **options).transpose(0, 1)


def sight(causal: bool, device: torch.device) -> dict[str, Any]:
    """What tells the kernel which keys a query sees, of as many as there are queries: up to its own, or all."""
    return {"atten_mask": _future(device), "sparse_mode": CAUSAL} if causal else {}


def _fused(query: Tensor, key: Tensor, value: Tensor, layout: str, **options: Any) -> Tensor:  # noqa: ANN401
    # Under autocast the rotated query and key may be wider than the value, and the kernel wants one dtype.
    query, key = query.to(value.dtype), key.to(value.dtype)
    heads, scale = query.shape[layout.index("N")], query.shape[-1] ** -0.5
    outputs = torch_npu().npu_fusion_attention(query, key, value, heads, layout, scale=scale, **options)
    return outputs[0]

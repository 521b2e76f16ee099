"""Fused attention (Dao et al., arXiv 2205.14135) with the statistics that its backward and ring attention need.

Source: op-plugin's documentation of npu_fusion_attention and the checks and kernels of aclnnFlashAttentionScore and
aclnnFlashAttentionVarLenScore. The value is softmax(scale * q k^T, masked) v in float32, rounded once: the device's
16-bit kernels also round the probabilities before they multiply by v, within the budget of their accuracy class.
"""

# Shapes: B batch, N query heads, S queries, K keys, D head dim of keys, V of values.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spec.npu_ops.attention_blocks import Blocks
from spec.npu_ops.attention_checks import refuse_attention
from spec.npu_ops.attention_grad import attention_grad
from spec.npu_ops.attention_mask import blind_rows_are_zero, masked_pairs
from spec.npu_ops.contract import Call, Contract, wide

MAX_TOKENS = 2147483647


class Attended(NamedTuple):
    """Output [B, N, S, V], row maxima [B, N, S] of the scores, and sums of exp(score - maximum)."""

    output: Tensor
    maximum: Tensor
    total: Tensor


def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = MAX_TOKENS,
    next_tockens: int = MAX_TOKENS,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """softmax(scale * q k^T) v, with grouped query heads, masks and packed sequences.

    `scale` is 1 unless it is given; it is not 1/sqrt(D).

    Args:
        input_layout: BSH, SBH, BNSD, BSND or TND.
        atten_mask: bool or uint8, True is masked OUT; see attention_mask.py for the sparse modes.
        actual_seq_qlen, actual_seq_kvlen: with TND the cumulative ends of the sequences, without a leading zero.
        softmax_layout: with TND, "TND" orders the statistics by token; see `Blocks.join_statistics` for the default.
    Returns:
        output in the layout and dtype of the query; float32 softmax_max and softmax_sum, [B, N, S, 8] or [T, N, 8]; an
        empty tensor; seed, offset and numels of dropout, which this contract does not describe. Autograd uses the
        gradient of the output alone: what flows into the statistics is silently lost.
    """
    call = Call(**locals())
    blocks = Blocks.of(call)
    found = [
        attend(*block, call) for block in zip(blocks.queries(query), blocks.keys(key), blocks.keys(value), strict=True)
    ]
    statistics = [
        blocks.join_statistics([getattr(one, name) for one in found], softmax_layout) for name in ("maximum", "total")
    ]
    output = blocks.join([one.output for one in found]).to(query.dtype)
    return output, statistics[0], statistics[1], query.new_empty(0), 0, 0, 0


def attend(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Attended:
    """One block [B, N, S, D]; `key` and `value` may have fewer heads. Results in the wide dtype."""
    dtype, rows = wide(query), query.shape[:3]
    if query.size(2) == 0:
        return Attended(*(torch.zeros(shape, dtype=dtype) for shape in ((*rows, value.size(-1)), rows, rows)))
    group = query.size(1) // key.size(1)
    key, value = (x.to(dtype).repeat_interleave(group, 1) for x in (key, value))
    score = query.to(dtype) @ key.transpose(-1, -2) * call.scale
    masked = masked_pairs(call, query.size(2), key.size(2))
    if masked is not None:
        score = score.masked_fill(masked, float("-inf"))
    return normalise(score, value, blind_rows_are_zero(call, query.size(2), key.size(2)))


def normalise(score: Tensor, value: Tensor, blind_is_zero: bool) -> Attended:
    """Softmax of the scores times the values; a row that sees nothing gives zeros and sum 0, or NaN throughout."""
    maximum = score.amax(-1)
    blind = maximum == float("-inf")
    maximum = maximum.masked_fill(blind, torch.finfo(torch.float32).min)
    exponential = (score - maximum[..., None]).exp()
    total = exponential.sum(-1)
    output = exponential / total.masked_fill(blind, 1)[..., None] @ value
    if not blind_is_zero:
        output = output.masked_fill(blind[..., None], float("nan"))
        maximum, total = maximum.masked_fill(blind, float("nan")), total.masked_fill(blind, float("nan"))
    return Attended(output, maximum, total)


def attention_gradients(grads: Sequence[Tensor], call: Call, outputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Gradients of query, key and value."""
    found = attention_grad(
        call.query,
        call.key,
        call.value,
        grads[0],
        call.head_num,
        call.input_layout,
        atten_mask=call.atten_mask,
        softmax_max=outputs[1],
        softmax_sum=outputs[2],
        softmax_in=outputs[3],
        attention_in=outputs[0],
        scale_value=call.scale,
        pre_tockens=call.pre_tockens,
        next_tockens=call.next_tockens,
        inner_precise=call.inner_precise,
        actual_seq_qlen=call.actual_seq_qlen,
        actual_seq_kvlen=call.actual_seq_kvlen,
        sparse_mode=call.sparse_mode,
        softmax_layout=call.softmax_layout,
    )
    return dict(zip(("query", "key", "value"), found[:3], strict=True))


ATTENTION = Contract("npu_fusion_attention", fusion_attention, refuse_attention, attention_gradients)

"""The gradient of fused attention (Dao et al., arXiv 2205.14135, algorithm 4); sources as in attention.py."""

# Shapes: B batch, N query heads, G heads that share a key head, S queries, K keys, D head dim of keys, V of values.

from __future__ import annotations

import torch
from torch import Tensor

from spec.npu_ops.attention_blocks import Blocks
from spec.npu_ops.attention_checks import refuse_shared
from spec.npu_ops.attention_mask import masked_pairs
from spec.npu_ops.contract import Call, Contract, wide
from spec.npu_ops.refuse import check_dtype, refuse_if

MAX_TOKENS = 2147483647
OPERATOR = "npu_fusion_attention_grad"


def attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = MAX_TOKENS,
    next_tockens: int = MAX_TOKENS,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of query, key and value in the query's dtype; then None (pse) and an empty tensor (sink).

    Probabilities are rebuilt from the statistics that are GIVEN, exp(score - softmax_max) / softmax_sum, and the row
    term is sum(dy * attention_in). Ring attention feeds the merged statistics and output block by block, and the
    blocks' gradients then add up to those of the whole.
    """
    assert softmax_max is not None
    assert softmax_sum is not None
    assert attention_in is not None
    call = Call(**locals())
    blocks = Blocks.of(call)
    found = [
        attend_backward(call, *block)
        for block in zip(
            blocks.queries(query),
            blocks.keys(key),
            blocks.keys(value),
            blocks.queries(dy),
            blocks.queries(attention_in),
            blocks.cut_statistics(softmax_max, softmax_layout),
            blocks.cut_statistics(softmax_sum, softmax_layout),
            strict=True,
        )
    ]
    joined = [blocks.join([one[place] for one in found]).to(query.dtype) for place in range(3)]
    return joined[0], joined[1], joined[2], None, torch.empty(0)


def attend_backward(
    call: Call, query: Tensor, key: Tensor, value: Tensor, dy: Tensor, output: Tensor, maximum: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One block; P the probabilities: dV = P^T dY, dS = P * (dY V^T - sum(dY * Y)) * scale, dQ = dS K, dK = dS^T Q.

    A key head that several query heads share collects their gradients in the wide dtype.
    """
    dtype, group = wide(query), query.size(1) // key.size(1)
    query, dy, output = query.to(dtype), dy.to(dtype), output.to(dtype)
    keys, values = (x.to(dtype).repeat_interleave(group, 1) for x in (key, value))
    score = query @ keys.transpose(-1, -2) * call.scale_value
    masked = masked_pairs(call, query.size(2), key.size(2))
    if masked is not None:
        score = score.masked_fill(masked, float("-inf"))
    # A row that sees nothing has sum 0 and takes no part.
    probability = (score - maximum[..., None]).exp() / total.masked_fill(total == 0, float("inf"))[..., None]
    to_score = probability * (dy @ values.transpose(-1, -2) - (dy * output).sum(-1, keepdim=True)) * call.scale_value
    to_key, to_value = to_score.transpose(-1, -2) @ query, probability.transpose(-1, -2) @ dy
    return to_score @ keys, sum_groups(to_key, group), sum_groups(to_value, group)


def sum_groups(x: Tensor, group: int) -> Tensor:
    """Sums over the query heads that share a key head."""
    return x.unflatten(1, (-1, group)).sum(2)


def refuse_attention_grad(call: Call) -> None:
    """What npu_fusion_attention_grad refuses."""
    refuse_shared(OPERATOR, call)
    blocks = Blocks.of(call)
    for name in ("softmax_max", "softmax_sum", "attention_in"):
        refuse_if(getattr(call, name) is None, f"{OPERATOR}: {name} must be given")
    rows = blocks.queries(call.query)
    shape: tuple[int, ...] = (call.query.size(0), call.head_num, 8)
    if call.input_layout != "TND":
        shape = (rows[0].size(0), call.head_num, rows[0].size(2), 8)
    for name in ("softmax_max", "softmax_sum"):
        statistic = getattr(call, name)
        check_dtype(name, statistic, (torch.float32,))
        refuse_if(statistic.shape != shape, f"{OPERATOR}: {name} must be {shape}, got {tuple(statistic.shape)}")
    for name in ("dy", "attention_in"):
        tensor = getattr(call, name)
        refuse_if(tensor.dtype != call.query.dtype, f"{OPERATOR}: {name} must have the query's dtype")
        refuse_if(tensor.shape != call.dy.shape, f"{OPERATOR}: dy and attention_in must have the same shape")


ATTENTION_GRAD = Contract(OPERATOR, attention_grad, refuse_attention_grad)

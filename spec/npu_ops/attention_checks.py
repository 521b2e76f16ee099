"""What fused attention and its gradient refuse."""

from __future__ import annotations

from itertools import pairwise

from spec.npu_ops.attention_blocks import LAYOUTS, Blocks, head_dim, key_heads, sequence_ends
from spec.npu_ops.attention_mask import refuse_mask
from spec.npu_ops.contract import Call
from spec.npu_ops.refuse import check_dtype, refuse_if, refuse_undescribed

WIDEST_HEAD = 768
MOST_HEADS = 256
MOST_SEQUENCES = 2048


def refuse_attention(call: Call) -> None:
    """What npu_fusion_attention refuses."""
    refuse_undescribed("npu_fusion_attention", dropout_mask=call.dropout_mask)
    refuse_shared("npu_fusion_attention", call)


def refuse_shared(operator: str, call: Call) -> None:
    """What forward and gradient have in common."""
    refuse_undescribed(operator, pse=call.pse, padding_mask=call.padding_mask, prefix=call.prefix, sink=call.sink)
    refuse_if(call.keep_prob != 1.0, f"{operator}: keep_prob={call.keep_prob} is not described by this contract")
    refuse_if(
        call.input_layout not in LAYOUTS,
        f"The input_layout should be BSH/SBH/BNSD/BSND/TND, but got {call.input_layout}.",
    )
    refuse_if(call.softmax_layout not in ("", "TND"), f"{operator}: softmax_layout must be '' or 'TND'")
    refuse_if(call.head_num <= 0, f"head_num must > 0, but got {call.head_num}")
    for name in ("query", "key", "value"):
        tensor = getattr(call, name)
        check_dtype(name, tensor)
        refuse_if(tensor.dtype != call.query.dtype, f"{operator}: query, key and value must have one dtype")
        dims = LAYOUTS[call.input_layout]
        refuse_if(tensor.dim() != dims, f"{operator}: layout {call.input_layout} takes {name} with {dims} dims")
    refuse_heads(operator, call)
    if call.input_layout == "TND":
        refuse_lengths(operator, call)
    refuse_blocks(operator, call)


def refuse_heads(operator: str, call: Call) -> None:
    """Numbers and widths of heads that do not fit together."""
    flat, axis = call.input_layout in ("BSH", "SBH"), {"BNSD": 1, "BSND": 2, "TND": 1}.get(call.input_layout, -1)
    heads = call.head_num
    fits = call.query.size(-1) % heads == 0 if flat else call.query.size(axis) == heads
    refuse_if(not fits, f"{operator}: query {tuple(call.query.shape)} does not have head_num = {heads} heads")
    width = head_dim(call)
    refuse_if(not 0 < width <= WIDEST_HEAD, f"{operator}: D = {width} must be 1 to {WIDEST_HEAD}")
    refuse_if(call.key.size(-1) % width != 0, f"{operator}: D of query is {width}, key is {tuple(call.key.shape)}")
    refuse_if(not flat and call.key.size(-1) != width, f"{operator}: query and key must have the same D")
    shared = key_heads(call)
    refuse_if(shared == 0 or heads % shared != 0, f"{operator}: {heads} query heads are no multiple of {shared}")
    refuse_if(heads > MOST_HEADS, f"{operator}: at most {MOST_HEADS} heads are supported, but got {heads}")
    fits = call.value.size(-1) % shared == 0 if flat else call.value.size(axis) == shared
    refuse_if(not fits, f"{operator}: key and value must have the same number of heads")
    values = call.value.size(-1) // shared if flat else call.value.size(-1)
    refuse_if(values > width, f"{operator}: D of value ({values}) must not exceed D of key ({width})")


def refuse_lengths(operator: str, call: Call) -> None:
    """Missing or impossible cumulative lengths."""
    given = call.actual_seq_qlen or [], call.actual_seq_kvlen or []
    refuse_if(
        not given[0] or len(given[0]) != len(given[1]),
        "the size of actual_seq_qlen and actual_seq_kvlen must be the same and cannot be empty.",
    )
    refuse_if(len(given[0]) > MOST_SEQUENCES, f"{operator}: at most {MOST_SEQUENCES} sequences are supported")
    ends = [sequence_ends(lengths) for lengths in given]
    refuse_if(len(ends[0]) != len(ends[1]), f"{operator}: a sequence without queries at the end must have no keys")
    for name, tensor, of_name in (("query", call.query, ends[0]), ("key", call.key, ends[1])):
        rising = all(first <= last for first, last in pairwise([0, *of_name]))
        refuse_if(not rising, f"{operator}: cumulative lengths of {name} must not fall: {list(of_name)}")
        refuse_if(
            of_name[-1] != tensor.size(0),
            f"{operator}: cumulative lengths of {name} end at {of_name[-1]}, but it has {tensor.size(0)} tokens",
        )


def refuse_blocks(operator: str, call: Call) -> None:
    """Batches and sequences that do not match, and masks that do not fit them."""
    blocks = Blocks.of(call)
    queries, keys, values = blocks.queries(call.query), blocks.keys(call.key), blocks.keys(call.value)
    same = call.key.shape[:-1] == call.value.shape[:-1] and queries[0].size(0) == keys[0].size(0)
    refuse_if(not same or values[0].size(2) != keys[0].size(2), f"{operator}: batch or sequence sizes differ")
    for query, key in zip(queries, keys, strict=True):
        refuse_if(
            query.size(2) > 0 and key.size(2) == 0,
            f"{operator}: a sequence with queries but without keys is not described by this contract",
        )
    longest = max(query.size(2) for query in queries), max(key.size(2) for key in keys)
    refuse_mask(call, queries[0].size(0), *longest)

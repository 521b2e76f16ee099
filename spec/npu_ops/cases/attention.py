"""Cases of fused attention, its gradient and the ring update."""

# Shapes: B batch, S sequence, N heads, D head dim, H = N*D, T tokens of all sequences.

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from spec.npu_ops.attention import fusion_attention
from spec.npu_ops.attention_blocks import LAYOUTS
from spec.npu_ops.attention_mask import BAND, CAUSAL_LEFT_UP, CAUSAL_RIGHT_DOWN, FULL, compressed_mask
from spec.npu_ops.cases.draws import Case, Draw

MODES = (FULL, CAUSAL_LEFT_UP, CAUSAL_RIGHT_DOWN, BAND)


def lay_out(x: Tensor, layout: str) -> Tensor:
    """A tensor [B, N, S, D] in one of the padded layouts, as a view where possible."""
    if layout == "BNSD":
        return x
    x = x.transpose(1, 2)
    if layout == "BSND":
        return x
    return x.flatten(2) if layout == "BSH" else x.flatten(2).transpose(0, 1)


def draw_attention(draw: Draw) -> Case:
    """Every layout and sparse mode, grouped heads, narrower values."""
    layout = draw.choice(list(LAYOUTS))
    shared, group = draw.integer(1, 3), draw.integer(1, 3)
    width = draw.integer(2, 9)
    # The device's shape inference for flat layouts takes the width of values from that of keys.
    narrow = width if layout in ("BSH", "SBH") else draw.integer(1, width)
    heads = (shared * group, shared, shared)
    widths, dtype = (width, width, narrow), draw.dtype()
    sizes = draw_packed if layout == "TND" else draw_padded
    tensors, kwargs = sizes(draw, layout, heads, widths, dtype)
    if draw.flag():
        kwargs["scale"] = width**-0.5
    return Case((*tensors, heads[0], layout), kwargs)


def draw_padded(
    draw: Draw, layout: str, heads: tuple[int, ...], widths: tuple[int, ...], dtype: torch.dtype
) -> tuple[list[Tensor], dict[str, Any]]:
    """Query, key and value of one length each, and a mask."""
    batch, queries, keys = draw.sizes(3, 1, 9)
    lengths, (query_heads, *_) = (queries, keys, keys), heads
    tensors = [
        lay_out(draw.normal(batch, n, s, d, dtype=dtype), layout)
        for n, s, d in zip(heads, lengths, widths, strict=True)
    ]
    mode = draw.choice([None, *MODES])
    if mode is None:
        return tensors, {}
    if mode != FULL:
        # Behind a band whose window reaches less far than the sequences differ there are rows that see nothing.
        window = {"pre_tockens": draw.integer(queries, 12), "next_tockens": draw.integer(0, 3)} if mode == BAND else {}
        return tensors, {"atten_mask": compressed_mask(), "sparse_mode": mode, "inner_precise": 2} | window
    leading = draw.choice([(), (1, 1), (batch, 1), (batch, query_heads)])
    mask = draw.integers(2, *leading, queries, keys, dtype=torch.uint8)
    return tensors, {"atten_mask": mask.bool() if draw.flag() else mask, "inner_precise": 2}


def draw_packed(
    draw: Draw, layout: str, heads: tuple[int, ...], widths: tuple[int, ...], dtype: torch.dtype
) -> tuple[list[Tensor], dict[str, Any]]:
    """Query, key and value of several sequences; some are empty."""
    queries = [draw.integer(0, 6) for _ in range(draw.integer(1, 4))]
    queries[0] += 1
    keys = [length + draw.integer(0, 3) if length else draw.choice([0, 2]) for length in queries]
    keys[-1] = keys[-1] if queries[-1] else 0
    lengths = (sum(queries), sum(keys), sum(keys))
    tensors = [draw.tensor(t, n, d, dtype=dtype) for t, n, d in zip(lengths, heads, widths, strict=True)]
    kwargs = packed(queries, keys) | {"softmax_layout": draw.choice(["", "TND"])}
    mode = draw.choice([None, CAUSAL_LEFT_UP, CAUSAL_RIGHT_DOWN, FULL])
    if mode == FULL:
        return tensors, kwargs | {"atten_mask": torch.ones(max(queries), max(keys), dtype=torch.bool).triu(1)}
    return tensors, kwargs if mode is None else kwargs | {"atten_mask": compressed_mask(), "sparse_mode": mode}


def packed(queries: list[int], keys: list[int]) -> dict[str, Any]:
    """Cumulative lengths."""
    return {"actual_seq_qlen": list(accumulate(queries)), "actual_seq_kvlen": list(accumulate(keys))}


def edges_attention() -> list[Case]:
    """Alignment of causal masks, many query heads per key head, empty sequences, rows that see nothing."""
    draw = Draw.seeded(5)
    q, k, v = draw.normal(2, 4, 5, 8), draw.normal(2, 2, 7, 8), draw.normal(2, 2, 7, 8)
    many, few = draw.normal(1, 96, 3, 4), draw.normal(1, 8, 3, 4)
    t, u = draw.normal(7, 4, 8), draw.normal(7, 2, 8)
    causal = {"atten_mask": compressed_mask()}
    return [
        Case((q, k, v, 4, "BNSD"), causal | {"sparse_mode": 2}, "more keys than queries, lined up at the start"),
        Case((q, k, v, 4, "BNSD"), causal | {"sparse_mode": 3}, "more keys than queries, lined up at the end"),
        Case((q, k[:, :, :3], v[:, :, :3], 4, "BNSD"), causal | {"sparse_mode": 3}, "rows that see nothing"),
        Case((q, k, v, 4, "BNSD"), label="scale left out"),
        Case((many, few, few, 96, "BNSD"), causal | {"sparse_mode": 3, "scale": 0.5}, "12 query heads per key head"),
        Case((t, u, u, 4, "TND"), packed([3, 0, 4], [3, 0, 4]), "an empty sequence in the middle"),
        Case((t, u, u, 4, "TND"), packed([0, 7], [0, 7]), "an empty sequence at the start"),
        Case((t, u, u, 4, "TND"), packed([0, 7], [2, 5]), "a sequence of keys that nobody asks"),
        Case((t, u, u, 4, "TND"), {"actual_seq_qlen": [3, 7, 0], "actual_seq_kvlen": [3, 7, 0]}, "a batch left out"),
        Case((t, u, u, 4, "TND"), packed([3, 4], [3, 4]) | {"softmax_layout": "TND"}, "statistics by token"),
    ]


def refusals_attention() -> list[tuple[str, Case, str]]:
    """Calls that must be refused."""
    q, k = torch.ones(2, 4, 5, 8), torch.ones(2, 2, 5, 8)
    fine, t = (q, k, k, 4, "BNSD"), torch.ones(7, 4, 8)
    tnd = (t, t, t, 4, "TND")
    causal, mask = {"sparse_mode": 2}, compressed_mask()
    return [
        ("unknown layout", Case((q, k, k, 4, "NBSD")), "BSH/SBH/BNSD/BSND/TND, but got NBSD"),
        ("float64", Case((q.double(), k.double(), k.double(), 4, "BNSD")), "DT_DOUBLE"),
        ("dtypes differ", Case((q, k.half(), k, 4, "BNSD")), "must have one dtype"),
        ("dims and layout", Case((q, k, k, 4, "BSH")), "layout BSH takes query with 3 dims"),
        ("no heads", Case((q, k, k, 0, "BNSD")), "head_num must > 0"),
        ("heads of another layout", Case((q, k, k, 4, "BSND")), "does not have head_num = 4 heads"),
        ("heads that do not divide", Case((q, torch.ones(2, 3, 5, 8), k, 4, "BNSD")), "no multiple of 3"),
        ("too wide", Case((torch.ones(1, 1, 1, 769),) * 3 + (1, "BNSD")), "must be 1 to 768"),
        ("too many heads", Case((torch.ones(1, 257, 1, 8),) * 3 + (257, "BNSD")), "at most 256 heads"),
        ("D differs", Case((q, k[..., :6], k, 4, "BNSD")), "D of query is 8"),
        ("values wider than keys", Case((q, k, torch.ones(2, 2, 5, 9), 4, "BNSD")), "must not exceed D of key"),
        ("lengths of key and value", Case((q, k, k[:, :, :4], 4, "BNSD")), "batch or sequence sizes differ"),
        ("dropout", Case(fine, {"keep_prob": 0.9}), "keep_prob=0.9"),
        ("position bias", Case(fine, {"pse": q}), "pse="),
        ("sink", Case(fine, {"sink": torch.ones(4)}), "sink="),
        ("mode 1", Case(fine, {"sparse_mode": 1, "atten_mask": torch.ones(5, 5).bool()}), "1 (allMask) is not"),
        ("mode 7", Case(fine, {"sparse_mode": 7, "atten_mask": mask}), "7 (rightDownCausalBand) is not"),
        ("mode without mask", Case(fine, {"sparse_mode": 3}), "sparse_mode 3 needs atten_mask"),
        ("whole mask in mode 2", Case(fine, causal | {"atten_mask": mask[:5, :5]}), "compressed 2048x2048"),
        ("inverted triangle", Case(fine, causal | {"atten_mask": ~mask}), "True strictly above the diagonal"),
        ("float mask", Case(fine, {"atten_mask": torch.ones(5, 5)}), "atten_mask not implemented for DT_FLOAT"),
        ("mask of another size", Case(fine, {"atten_mask": torch.ones(5, 6).bool()}), "must be one of"),
        ("no lengths", Case(tnd), "actual_seq_kvlen must be the same and cannot be empty"),
        ("lengths of queries only", Case(tnd, {"actual_seq_qlen": [7]}), "must be the same and cannot be empty"),
        (
            "lengths instead of ends",
            Case(tnd, {"actual_seq_qlen": [4, 3], "actual_seq_kvlen": [4, 3]}),
            "must not fall",
        ),
        ("ends too soon", Case(tnd, {"actual_seq_qlen": [4, 6], "actual_seq_kvlen": [4, 7]}), "it has 7 tokens"),
        ("queries without keys", Case(tnd, packed([3, 4], [0, 7])), "with queries but without keys"),
        (
            "keys of a skipped batch",
            Case(tnd, {"actual_seq_qlen": [7, 0], "actual_seq_kvlen": [3, 7]}),
            "without queries at the end",
        ),
        ("too many sequences", Case(tnd, packed([7] + [0] * 2048, [7] + [0] * 2048)), "at most 2048 sequences"),
        ("key and value heads differ", Case((q, k, q, 4, "BNSD")), "same number of heads"),
        ("keys twice as wide", Case((q, torch.ones(2, 2, 5, 16), k, 4, "BNSD")), "must have the same D"),
        ("mode 9", Case(fine, {"sparse_mode": 9, "atten_mask": mask}), "sparse_mode must be 0 to 8"),
        ("statistics by head", Case(fine, {"softmax_layout": "NTD"}), "softmax_layout must be"),
        ("drop mask", Case(fine, {"dropout_mask": q}), "dropout_mask="),
    ]


def draw_attention_grad(draw: Draw) -> Case:
    """The gradient of a drawn forward."""
    forward = draw_attention(draw)
    output, maximum, total, *_ = fusion_attention(*forward.args, **forward.kwargs)
    return grad_case(forward, draw.normal(*output.shape, dtype=output.dtype), output, maximum, total)


def grad_case(forward: Case, dy: Tensor, output: Tensor, maximum: Tensor, total: Tensor) -> Case:
    """The call of the gradient that belongs to a call of the forward."""
    query, key, value, *rest = forward.args
    kwargs = {("scale_value" if name == "scale" else name): option for name, option in forward.kwargs.items()}
    statistics = {"softmax_max": maximum, "softmax_sum": total, "attention_in": output}
    return Case((query, key, value, dy, *rest), kwargs | statistics)


def refusals_attention_grad() -> list[tuple[str, Case, str]]:
    """Calls that must be refused."""
    q, row = torch.ones(2, 4, 5, 8), torch.ones(2, 4, 5, 8)
    fine = grad_case(Case((q, q, q, 4, "BNSD")), q, q, row, row)
    changes: list[tuple[str, dict[str, Any], str]] = [
        ("no statistics", {"softmax_max": None}, "softmax_max must be given"),
        ("no output", {"attention_in": None}, "attention_in must be given"),
        ("16-bit statistics", {"softmax_sum": row.half()}, "softmax_sum not implemented for DT_FLOAT16"),
        ("statistics without repeats", {"softmax_sum": row[..., :1]}, "must be (2, 4, 5, 8)"),
        ("output of another dtype", {"attention_in": q.half()}, "attention_in must have the query's dtype"),
        ("dropout", {"keep_prob": 0.5}, "keep_prob=0.5"),
        ("output of another shape", {"attention_in": q[..., :4]}, "dy and attention_in must have the same shape"),
    ]
    return [(label, Case(fine.args, fine.kwargs | change), message) for label, change, message in changes]


def draw_ring(draw: Draw) -> Case:
    """Statistics as two blocks of keys could have given them."""
    layout, dtype = draw.choice(["SBH", "TND"]), draw.dtype()
    if layout == "SBH":
        sequence, batch, heads = draw.sizes(3, 1, 7)
        outputs = [draw.tensor(sequence, batch, heads * 4, dtype=dtype) for _ in range(2)]
        return ring_case(draw, outputs, (batch, heads, sequence), {} if draw.flag() else {"input_layout": "SBH"})
    lengths = [draw.integer(0, 4) for _ in range(draw.integer(1, 3))]
    lengths[0] += 1
    tokens, heads = sum(lengths), draw.integer(1, 3)
    outputs = [draw.tensor(tokens, heads, 64, dtype=dtype) for _ in range(2)]
    order, ends = {"input_softmax_layout": draw.choice(["", "TND"])}, torch.tensor([0, *accumulate(lengths)])
    return ring_case(draw, outputs, (tokens, heads), order | {"input_layout": "TND", "actual_seq_qlen": ends})


def ring_case(draw: Draw, outputs: list[Tensor], shape: tuple[int, ...], options: dict[str, Any]) -> Case:
    """The call with drawn statistics."""
    maxima = [draw.normal(*shape)[..., None].repeat_interleave(8, -1) for _ in range(2)]
    sums = [1 + draw.normal(*shape).abs()[..., None].repeat_interleave(8, -1) for _ in range(2)]
    return Case((outputs[0], maxima[0], sums[0], outputs[1], maxima[1], sums[1]), options)


def refusals_ring() -> list[tuple[str, Case, str]]:
    """Calls that must be refused."""
    out, row, t, tn = torch.ones(5, 2, 12), torch.ones(2, 3, 5, 8), torch.ones(5, 2, 64), torch.ones(5, 2, 8)
    fine, packed_row = (out, row, row, out, row, row), (t, tn, tn, t, tn, tn)
    tnd: dict[str, Any] = {"input_layout": "TND", "actual_seq_qlen": torch.tensor([0, 2, 5])}
    ends = tnd | {"actual_seq_qlen": torch.tensor([2, 5])}
    return [
        ("unknown layout", Case(fine, {"input_layout": "BSH"}), "only supports 'SBH' or 'TND', but got BSH"),
        ("outputs differ", Case((out, row, row, out[:4], row, row)), "must have the same shape"),
        ("dtypes differ", Case((out, row, row, out.half(), row, row)), "must have the same dtype"),
        ("float64", Case((out.double(), row, row, out.double(), row, row)), "only supports float16"),
        ("statistics differ", Case((out, row, row, out, row, row[:1])), "softmax tensors must keep the same shape"),
        ("16-bit statistics", Case((out, row, row, out, row, row.half())), "softmax tensors must use float32"),
        ("one number per row", Case((out, *(row[..., :1],) * 2, out, *(row[..., :1],) * 2)), "last dimension to be 8"),
        ("statistics of TND", Case((out, tn, tn, out, tn, tn)), "must be 4D when input_layout is 'SBH'"),
        ("no lengths", Case(packed_row, {"input_layout": "TND"}), "actual_seq_qlen is required"),
        ("int32 lengths", Case(packed_row, tnd | {"actual_seq_qlen": torch.tensor([0, 5]).int()}), "int64"),
        ("no leading zero", Case(packed_row, ends), "must rise from 0 to 5"),
        ("narrow heads", Case((t[..., :32], tn, tn, t[..., :32], tn, tn), tnd), "a multiple of 64"),
        ("unknown order", Case(fine, {"input_softmax_layout": "BNS"}), "'SBH' or 'TND', but got BNS"),
        ("4-D output", Case((row, row, row, row, row, row)), "must be a 3D tensor, but got 4D"),
        ("statistics of SBH", Case((t, *(tn[None],) * 2, t, *(tn[None],) * 2), tnd), "must be 3D when"),
        ("statistics of more heads", Case((t, *(row[0],) * 2, t, *(row[0],) * 2), tnd), "do not fit attn_out"),
        ("statistics of another batch", Case((out[:, :1], row, row, out[:, :1], row, row)), "do not fit attn_out"),
    ]

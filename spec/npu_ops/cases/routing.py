"""Cases of permute, unpermute, gating and their gradients."""

# Shapes: T tokens, H hidden, K experts per token, E experts.

from __future__ import annotations

import torch
from torch import Tensor

from spec.npu_ops.cases.draws import Case, Draw
from spec.npu_ops.permute import permute
from spec.npu_ops.refuse import FLOATS

INDEX_DTYPES = (torch.int32, torch.int64)


def draw_permute(draw: Draw) -> Case:
    """Any tokens, kept whole or cut short."""
    tokens, hidden, slots = draw.sizes(3, 1, 12)
    shape = (tokens,) if draw.flag() else (tokens, slots)
    indices = draw.integers(draw.integer(1, 9), *shape, dtype=draw.choice(INDEX_DTYPES))
    rows = indices.numel()
    kept = draw.choice([None, 0, draw.integer(1, rows), rows + 5, -draw.integer(0, rows)])
    return Case((draw.tensor(tokens, hidden, dtype=draw.dtype()), indices, kept))


def edges_permute() -> list[Case]:
    """Shapes and orders at the border."""
    draw = Draw.seeded(1)
    tokens = draw.normal(5, 7)
    tied = torch.full((5, 3), 2)
    return [
        Case((tokens, draw.integers(4, 5)), label="one expert per token, 1-D indices"),
        Case((tokens, draw.integers(4, 5, 1, dtype=torch.int32)), label="one expert per token, 2-D int32 indices"),
        Case((tokens, tied), label="all choose the same expert"),
        Case((tokens, draw.integers(4, 5, 3), 4), label="dropped tokens"),
        Case((tokens, draw.integers(4, 5, 3), -2), label="negative num_out_tokens"),
        Case((tokens.new_zeros(0, 7), draw.integers(4, 0, 3)), label="no tokens"),
        Case((draw.normal(5, 14)[:, ::2], draw.integers(4, 5, 3)), label="strided tokens"),
    ]


def refusals_permute() -> list[tuple[str, Case, str]]:
    """Calls that must be refused, with a piece of the message."""
    tokens, indices = torch.ones(5, 7), torch.zeros(5, 3, dtype=torch.int64)
    return [
        ("padded mode", Case((tokens, indices, None, True)), "padded_mode"),
        ("3-D tokens", Case((tokens[None], indices)), "input tokens should be 2 dimensional"),
        ("3-D indices", Case((tokens, indices[None])), "input indices should be 2 or 1 dimensional"),
        ("float64", Case((tokens.double(), indices)), "DT_DOUBLE"),
        ("float indices", Case((tokens, indices.float())), "indices not implemented for DT_FLOAT"),
        ("other tokens", Case((tokens, indices[:4])), "differ in dim 0"),
        ("513 experts per token", Case((tokens, torch.zeros(5, 513, dtype=torch.int64))), "at most 512"),
        ("negative index", Case((tokens, indices - 1)), "must lie in"),
        ("index beyond float32", Case((tokens, indices + 2**24)), "must lie in"),
        ("too many indices", Case((tokens[:1].expand(2**23, 7), indices[:1, :2].expand(2**23, 2))), "at most 16777214"),
        ("drops more than there is", Case((tokens, indices, -16)), "drops too much"),
    ]


def draw_permute_grad(draw: Draw) -> Case:
    """The gradient of a drawn permutation."""
    tokens, hidden, slots = draw.sizes(3, 1, 12)
    dtype = draw.dtype()
    rows, places = permute(
        draw.normal(tokens, hidden, dtype=dtype), draw.integers(5, tokens, slots), draw.integer(0, 9)
    )
    return Case((draw.tensor(*rows.shape, dtype=dtype), places, tokens, dtype, slots))


def refusals_permute_grad() -> list[tuple[str, Case, str]]:
    """Calls that must be refused."""
    grad, places = torch.ones(6, 4), torch.arange(6, dtype=torch.int32)
    return [
        ("int64 places", Case((grad, places.long(), 3, grad.dtype, 2)), "sorted_indices not implemented for DT_INT64"),
        ("padded mode", Case((grad, places, 3, grad.dtype, 2, True)), "padded_mode"),
        ("wrong number", Case((grad, places, 4, grad.dtype, 2)), "tokens_size_0 * num_topK"),
    ]


def permuted(draw: Draw) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows in expert order, their places, and weights or none; rows may have been dropped."""
    tokens, hidden, slots = draw.sizes(3, 1, 12)
    dropped = draw.choice([0, 0, draw.integer(0, tokens * slots - 1)])
    _, places = permute(draw.normal(tokens, 1), draw.integers(5, tokens, slots))
    rows = draw.tensor(tokens * slots - dropped, hidden, dtype=draw.dtype())
    weights = draw.tensor(tokens, slots, dtype=draw.choice(FLOATS)) if draw.flag() else None
    return rows, places, weights


def draw_unpermute(draw: Draw) -> Case:
    """With and without weights, in every mix of dtypes."""
    return Case(permuted(draw))


def edges_unpermute() -> list[Case]:
    """Rows that must not be read, dropped rows, and mixed dtypes."""
    draw = Draw.seeded(2)
    _, places = permute(draw.normal(4, 1), draw.integers(5, 4, 3))
    rows, weights = draw.normal(12, 6), draw.normal(4, 3)
    spoilt, silent = rows.clone(), weights.clone()
    spoilt[places[4]], silent[1, 1] = float("nan"), 0.0
    return [
        Case((spoilt, places, silent), label="weight 0 on a row of NaN"),
        Case((rows[:7], places, weights), label="dropped tokens"),
        Case((rows, places, weights.bfloat16()), label="bfloat16 weights of float32 rows"),
        Case((rows.bfloat16(), places, weights), label="float32 weights of bfloat16 rows"),
        Case((rows, places), label="no weights: nothing is summed"),
        Case((rows[:0], places[:0], weights[:0]), label="no tokens"),
    ]


def refusals_unpermute() -> list[tuple[str, Case, str]]:
    """Calls that must be refused."""
    rows, places, weights = torch.ones(6, 4), torch.arange(6, dtype=torch.int32), torch.ones(3, 2)
    return [
        ("int64 places", Case((rows, places.long(), weights)), "sorted_indices not implemented for DT_INT64"),
        ("2-D places", Case((rows, places.view(3, 2), weights)), "sorted_indices should be 1 dimensional"),
        ("1-D weights", Case((rows, places, torch.ones(6))), "probs should be 2 dimensional"),
        ("3-D rows", Case((rows[None], places, weights)), "permuted_tokens should be 2 dimensional"),
        ("other weights", Case((rows, places, torch.ones(4, 2))), "one element per element of sorted_indices"),
        ("padded mode", Case((rows, places, weights, True)), "padded_mode"),
        ("float64", Case((rows.double(), places, weights)), "DT_DOUBLE"),
        ("float64 weights", Case((rows, places, weights.double())), "probs not implemented for DT_DOUBLE"),
    ]


def draw_unpermute_grad(draw: Draw) -> Case:
    """The gradient of a drawn way back."""
    rows, places, weights = permuted(draw)
    tokens = places.numel() if weights is None else weights.size(0)
    grad = draw.tensor(tokens, rows.size(1), dtype=rows.dtype)
    kwargs = {} if weights is None else {"probs": weights, "permuted_tokens": rows}
    return Case((grad, places, rows.size(0), rows.dtype), kwargs)


def refusals_unpermute_grad() -> list[tuple[str, Case, str]]:
    """Calls that must be refused."""
    grad, places, probs = torch.ones(3, 4), torch.arange(6, dtype=torch.int32), torch.ones(3, 2)
    both = {"probs": probs, "permuted_tokens": torch.ones(6, 4)}
    return [
        ("int64 places", Case((grad, places.long(), 6, grad.dtype), both), "DT_INT64"),
        ("weights without rows", Case((grad, places, 6, grad.dtype, probs)), "probs need permuted_tokens"),
    ]


def draw_gating(draw: Draw) -> Case:
    """Sigmoid or softmax, with and without groups and bias."""
    groups, size, dtype = draw.integer(1, 4), draw.integer(2, 6), draw.dtype()
    strong = draw.integer(1, groups)
    kwargs = {
        "bias": draw.normal(groups * size, dtype=dtype) if draw.flag() else None,
        "k_group": strong,
        "group_count": groups,
        "group_select_mode": draw.integer(0, 1),
        "norm_type": draw.integer(0, 1),
        "out_flag": draw.flag(),
        "routed_scaling_factor": draw.choice([1.0, 2.5]),
    }
    return Case((draw.tensor(draw.integer(1, 9), groups * size, dtype=dtype), draw.integer(1, size * strong)), kwargs)


def refusals_gating() -> list[tuple[str, Case, str]]:
    """Calls that must be refused."""
    x = torch.ones(3, 8)
    return [
        ("1-D logits", Case((x[0], 2)), "The x should be 2D"),
        ("float64", Case((x.double(), 2)), "DT_DOUBLE"),
        ("bias of another dtype", Case((x, 2), {"bias": torch.ones(8).half()}), "dtype of x"),
        ("bias of another size", Case((x, 2), {"bias": torch.ones(7)}), "1D with 8 elements"),
        ("groups that do not divide", Case((x, 2), {"group_count": 3}), "3 groups do not divide 8"),
        ("groups of one by their best two", Case((x, 2), {"group_count": 8, "group_select_mode": 1}), "at least 2"),
        ("more experts than the groups hold", Case((x, 5), {"group_count": 2}), "k must be 1 to 4"),
        ("renorm", Case((x, 2), {"renorm": 1}), "renorm must be 0"),
        ("unknown norm", Case((x, 2), {"norm_type": 2}), "norm_type must be 0 or 1"),
        ("ids", Case((x, 2), {"input_ids": torch.ones(3)}), "input_ids"),
        ("too many experts", Case((torch.ones(1, 2049), 2)), "at most 2048 experts"),
        ("unknown choice of groups", Case((x, 2), {"group_select_mode": 2}), "group_select_mode must be 0 or 1"),
        ("more groups than there are", Case((x, 2), {"group_count": 2, "k_group": 3}), "k_group must be 1 to 2"),
    ]


def draw_gating_backward(draw: Draw) -> Case:
    """Scores that a forward could have given."""
    tokens, experts, slots = draw.sizes(3, 2, 9)
    slots, norm_type = min(slots, experts), draw.integer(0, 1)
    logits = draw.normal(tokens, experts)
    scores = logits.sigmoid() if norm_type else logits.softmax(-1)
    chosen = scores.topk(slots).indices.int()
    grad = draw.tensor(tokens, slots, dtype=draw.dtype())
    return Case((scores, grad, chosen), {"norm_type": norm_type, "routed_scaling_factor": draw.choice([1.0, 2.5])})


def refusals_gating_backward() -> list[tuple[str, Case, str]]:
    """Calls that must be refused."""
    scores, grad, chosen = torch.ones(3, 8), torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int32)
    return [
        ("int64 experts", Case((scores, grad, chosen.long())), "expertIdx not implemented for DT_INT64"),
        ("16-bit scores", Case((scores.half(), grad, chosen)), "x_norm not implemented for DT_FLOAT16"),
        ("shapes differ", Case((scores, grad[:2], chosen)), "same shape"),
        ("float64 gradient", Case((scores, grad.double(), chosen)), "grad_y not implemented for DT_DOUBLE"),
    ]

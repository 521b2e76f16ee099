"""Values against what torch itself, or the model's law, says in float64."""

import pytest
import torch
import torch.nn.functional as F
from contract_tools import call, drawn, equal_in_float64, truth

from spec import router
from spec.config import TextConfig
from spec.npu_ops import OPERATORS
from spec.npu_ops.cases import edges
from spec.npu_ops.cases.draws import Draw
from spec.numerics import Policy
from spec.rope import rotate

SEEDS = range(30)


def normal(*shape, seed=0):
    return Draw.seeded(seed).normal(*shape).double()


def edge(name, label):
    return next(case for case in edges(name) if case.label == label)


@pytest.mark.parametrize("seed", SEEDS)
def test_permute_sorts_copies_by_expert(seed):
    case = drawn("npu_moe_token_permute", seed)
    tokens, indices, kept = case.args
    slots = indices.view(len(tokens), -1)
    order = sorted((int(e), t, k) for t, row in enumerate(slots) for k, e in enumerate(row))
    rows, places = call("npu_moe_token_permute", case)
    wanted = len(order) + kept if kept and kept < 0 else kept or len(order)
    assert rows.equal(torch.stack([tokens[t] for _, t, _ in order])[:wanted])
    assert places.tolist() == [order.index((int(e), t, k)) for t, row in enumerate(slots) for k, e in enumerate(row)]


@pytest.mark.parametrize("seed", SEEDS)
def test_unpermute_gathers_and_weighs(seed):
    case = truth(drawn("npu_moe_token_unpermute", seed))
    rows, places, weights = case.args
    whole = torch.cat([rows, rows.new_zeros(len(places) - len(rows), rows.size(1))])[places.long()]
    if weights is not None:
        whole = (whole.unflatten(0, weights.shape) * weights[..., None]).sum(1)
    assert equal_in_float64(call("npu_moe_token_unpermute", case), whole)


def test_there_and_back_is_the_sum_of_weights():
    tokens, indices, weights = (
        normal(5, 4),
        torch.tensor([[1, 0], [2, 2], [0, 1], [3, 0], [1, 3]]),
        normal(5, 2, seed=1),
    )
    rows, places = OPERATORS["npu_moe_token_permute"].forward(tokens, indices)
    back = OPERATORS["npu_moe_token_unpermute"].forward(rows, places, weights)
    assert equal_in_float64(back, tokens * weights.sum(1, keepdim=True))


def test_rows_of_weight_zero_are_never_read():
    case = edge("npu_moe_token_unpermute", "weight 0 on a row of NaN")
    assert case.args[0].isnan().any()
    assert call("npu_moe_token_unpermute", case).isfinite().all()


def test_dropped_rows_count_as_zero():
    case = truth(edge("npu_moe_token_unpermute", "dropped tokens"))
    rows, places, weights = case.args
    whole = torch.cat([rows, torch.zeros(5, 6)])
    assert equal_in_float64(
        call("npu_moe_token_unpermute", case),
        OPERATORS["npu_moe_token_unpermute"].forward(whole, places, weights),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_grouped_matmul_is_a_loop_of_products(seed):
    case = truth(drawn("npu_grouped_matmul", seed))
    (x,), (weight,), options = *case.args, case.kwargs
    counts = options["group_list"].tolist()
    if options["group_list_type"] == 0:
        counts = [last - first for first, last in zip([0, *counts], counts, strict=False)]
    if options["group_type"] == 2:
        groups = zip(x.t().split(counts), weight.split(counts), strict=True)
        expected = torch.stack([torch.einsum("mk,mn->kn", a, b) for a, b in groups])
    else:
        bias = options.get("bias", [[None] * len(counts)])[0]
        expected = torch.cat([F.linear(a, w.T, b) for a, w, b in zip(x.split(counts), weight, bias, strict=True)])
    assert equal_in_float64(call("npu_grouped_matmul", case)[0], expected)


@pytest.mark.parametrize("place", ["first", "last", "all but one"])
def test_a_group_without_rows_has_a_gradient_of_zero(place):
    case = edge("npu_grouped_matmul", f"weights' gradient, empty {place}")
    gradient = call("npu_grouped_matmul", case)[0]
    empty = case.kwargs["group_list"] == 0
    assert not gradient[empty].any()
    assert gradient[~empty].any()


def test_without_any_rows_the_gradient_is_memory_that_nobody_wrote():
    assert call("npu_grouped_matmul", edge("npu_grouped_matmul", "weights' gradient, no rows"))[0].isnan().all()


def test_without_any_rows_the_product_is_empty():
    assert call("npu_grouped_matmul", edge("npu_grouped_matmul", "forward, no rows"))[0].shape == (0, 5)


@pytest.mark.parametrize("seed", SEEDS)
def test_swiglu(seed):
    case = truth(drawn("npu_swiglu", seed))
    x, dim = case.args[0], case.args[1] if len(case.args) > 1 else -1
    gate, up = x.tensor_split(2, dim)
    assert equal_in_float64(call("npu_swiglu", case), F.silu(gate) * up)


def test_rotary_half_is_the_law():
    x, cos, sin = truth(edge("npu_rotary_mul", "64 of 128 dims, one table")).args
    assert OPERATORS["npu_rotary_mul"].forward(x, cos, sin).equal(rotate(x, cos, sin))


def test_rotary_interleaved_turns_complex_numbers():
    x, angle = normal(2, 3, 5, 8), normal(1, 1, 5, 4, seed=1)
    cos, sin = (table.repeat_interleave(2, -1) for table in (angle.cos(), angle.sin()))
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angle), angle)
    found = OPERATORS["npu_rotary_mul"].forward(x, cos, sin, "interleave")
    assert equal_in_float64(found, torch.view_as_real(turned).flatten(-2))


@pytest.mark.parametrize("seed", SEEDS)
def test_rms_norm(seed):
    case = truth(drawn("npu_rms_norm", seed))
    x, gamma, *epsilon = case.args
    expected = F.rms_norm(x, gamma.shape, gamma, *(epsilon or [1e-6]))
    y, rstd = call("npu_rms_norm", case)
    assert equal_in_float64(y, expected)
    assert equal_in_float64(x * rstd * gamma, expected)


def law_of_routing(experts, k, groups, strong, scale):
    numbers = dict.fromkeys(TextConfig.__dataclass_fields__, 0) | {
        "n_routed_experts": experts,
        "num_experts_per_tok": k,
        "n_group": groups,
        "topk_group": strong,
        "norm_topk_prob": True,
        "routed_scaling_factor": scale,
    }
    return TextConfig(**numbers)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gating_is_the_models_router(groups):
    logits, bias = normal(50, 16), normal(16, seed=1)
    config = law_of_routing(16, 4, groups, max(1, groups // 2), 1.5)
    law = router.route(logits, torch.eye(16).double(), bias, config, Policy())
    options = {"bias": bias, "k_group": config.topk_group, "group_count": groups, "group_select_mode": 1}
    weights, experts, _ = OPERATORS["npu_moe_gating_top_k"].forward(
        logits, 4, norm_type=1, routed_scaling_factor=1.5, **options
    )
    assert experts.tolist() == law.top_k_index_TK.tolist()
    assert equal_in_float64(weights, law.top_k_weight_TK)


def test_equal_scores_go_to_the_lower_expert():
    _, experts, _ = OPERATORS["npu_moe_gating_top_k"](torch.zeros(3, 8), 4, norm_type=1)
    assert experts.tolist() == [[0, 1, 2, 3]] * 3


def test_scores_that_were_not_asked_for_are_unwritten():
    logits = normal(3, 8).float()
    assert OPERATORS["npu_moe_gating_top_k"](logits, 2, norm_type=1)[2].isnan().all()
    assert OPERATORS["npu_moe_gating_top_k"](logits, 2, norm_type=1, out_flag=True)[2].equal(logits.sigmoid())

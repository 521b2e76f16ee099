import itertools
import json
from pathlib import Path

import pytest
import torch

from glmv.model import ModelConfig
from glmv.model.moe import Router
from glmv.ops import registry
from spec.config import Config
from spec.numerics import Policy
from spec.router import route

REAL = json.loads((Path(__file__).parents[2] / "data" / "glm45v_config.json").read_text())
TOKENS, HIDDEN, EXPERTS = 40, 20, 12
GENERATOR = torch.Generator().manual_seed(0)
HIDDEN_TH = torch.randn(TOKENS, HIDDEN, generator=GENERATOR).bfloat16().double()
WEIGHT_EH = torch.randn(EXPERTS, HIDDEN, generator=GENERATOR).bfloat16().double()
GRAD_TK = torch.randn(TOKENS, 12, generator=GENERATOR).double()
SETTINGS = list(itertools.product([True, False], [1.0, 2.5], [(1, 1), (4, 2)], [1, 3]))


def both_configs(norm, scale, groups, top_k):
    text = {
        "norm_topk_prob": norm,
        "routed_scaling_factor": scale,
        "n_group": groups[0],
        "topk_group": groups[1],
        "num_experts_per_tok": top_k,
        "n_routed_experts": EXPERTS,
        "hidden_size": HIDDEN,
    }
    mapping = REAL | {"text_config": REAL["text_config"] | text}
    machine = ModelConfig.from_hf(REAL).text.model_copy(update=text)
    return machine, Config.from_hf(mapping).text


def make_router(config, bias_E, dtype=torch.float64):
    router = Router(config)
    router.load_state_dict({"weight": WEIGHT_EH, "e_score_correction_bias": bias_E})
    return router.to(dtype)


def spread_bias(level):
    return level + 0.3 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("bias", [0.0, -0.9])  # with -0.9 every biased score is below 0
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_choice_weights_and_gradients(setting, bias, judge):
    machine, law_config = both_configs(*setting)
    top_k, bias_E = setting[3], spread_bias(bias).float().double()
    router, hidden = make_router(machine, bias_E), HIDDEN_TH.clone().requires_grad_()
    index, weight = router(hidden)
    weight.backward(GRAD_TK[:, :top_k])

    def law(policy):
        states, gate = HIDDEN_TH.clone().requires_grad_(), WEIGHT_EH.clone().requires_grad_()
        routing = route(policy.enter(states), gate, bias_E, law_config, policy, pinned_TK=index)
        routing.top_k_weight_TK.backward(GRAD_TK[:, :top_k])
        return {"weight": routing.top_k_weight_TK.detach(), "mlp.gate.weight": gate.grad, "hidden": states.grad}

    chosen = route(HIDDEN_TH, WEIGHT_EH, bias_E, law_config, Policy()).top_k_index_TK
    assert index.sort(-1).values.equal(chosen.sort(-1).values)
    judge({"weight": weight, "mlp.gate.weight": router.weight.grad, "hidden": hidden.grad}, law, torch.float64)


def test_one_normalised_choice_gives_the_router_no_gradient():
    machine, _ = both_configs(True, 1.0, (1, 1), 1)
    router = make_router(machine, spread_bias(0))
    router(HIDDEN_TH)[1].sum().backward()
    assert router.weight.grad.abs().max() <= torch.finfo(torch.float64).eps


def test_equal_scores_still_give_k_different_experts():
    machine, _ = both_configs(True, 1.0, (1, 1), 3)
    router = make_router(machine, torch.zeros(EXPERTS))
    index, weight = router(torch.zeros(5, HIDDEN, dtype=torch.float64))
    assert all(len(set(row)) == 3 for row in index.tolist())
    assert weight.equal(torch.full_like(weight, 0.5) / 1.5)


def test_bf16_tokens_are_scored_and_weighted_in_fp32():
    machine, _ = both_configs(True, 1.0, (1, 1), 3)
    bias_E = spread_bias(0)
    narrow, wide = make_router(machine, bias_E, torch.bfloat16), make_router(machine, bias_E, torch.float32)
    index, weight = narrow(HIDDEN_TH.bfloat16())
    expected_index, expected_weight = wide(HIDDEN_TH.float())
    assert (index.dtype, weight.dtype) == (torch.int64, torch.float32)
    assert index.equal(expected_index)
    assert weight.equal(expected_weight)


def test_the_bias_moves_the_choice_and_never_the_weight():
    machine, _ = both_configs(False, 1.0, (1, 1), 3)
    favoured = torch.zeros(EXPERTS).index_fill_(0, torch.tensor([2, 7, 9]), 5.0)
    index, weight = make_router(machine, favoured)(HIDDEN_TH)
    assert index.sort(-1).values.equal(torch.tensor([2, 7, 9]).expand(TOKENS, 3))
    assert weight.max() < 1


@pytest.mark.parametrize(("norm", "top_k", "warns"), [(True, 1, True), (False, 1, False), (True, 3, False)])
def test_routers_that_cannot_learn_are_warned_of(norm, top_k, warns, caplog):
    registry.say_once.cache_clear()
    machine, _ = both_configs(norm, 1.0, (1, 1), top_k)
    Router(machine)
    assert ("the routers get no gradient" in caplog.text) == warns

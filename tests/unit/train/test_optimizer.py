import pytest
import torch
from torch import nn

from glmv.config.training import TrainingConfig
from glmv.errors import GlmvError
from glmv.parallel.patterns import PatternError
from glmv.train.optimizer import build_optimizer, freeze, optimizer_step
from glmv.verify.updates import judge_update
from spec.optimizer import Hyper, State


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.ModuleDict({"vision": nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2)]), "head": nn.Linear(2, 5)})


def trained(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_a_frozen_module_takes_everything_below_it(model):
    freeze(model, ["vision"])
    assert trained(model) == ["head.weight", "head.bias"]


def test_a_pattern_may_name_a_single_parameter(model):
    assert freeze(model, ["vision.{*}.bias"]) == ["vision.0.bias", "vision.1.bias"]


def test_a_freeze_pattern_that_matches_nothing_is_an_error(model):
    with pytest.raises(PatternError, match=r"model\.freeze.*visoin"):
        freeze(model, ["visoin"])


def test_nothing_left_to_train_is_an_error(model):
    with pytest.raises(GlmvError, match="every parameter"):
        freeze(model, ["*"])


def test_frozen_parameters_are_not_in_the_optimizer(model):
    freeze(model, ["vision"])
    optimizer = build_optimizer(model, TrainingConfig())
    assert [p.shape for group in optimizer.param_groups for p in group["params"]] == [(5, 2), (5,)]


@pytest.mark.parametrize("fused", [True, False])
def test_a_parameter_that_nothing_used_decays_and_gets_a_state(model, fused):
    optimizer = build_optimizer(model, TrainingConfig(weight_decay=0.25, adam_fused=fused))
    before = model["head"].weight.detach().clone()
    model["vision"][0](torch.ones(1, 2)).sum().backward()
    optimizer_step(optimizer, lr=0.5)
    assert torch.equal(model["head"].weight, before * (1 - 0.5 * 0.25))
    assert len(optimizer.state) == 6


def test_the_step_uses_the_learning_rate_it_is_given(model):
    optimizer = build_optimizer(model, TrainingConfig(lr=1.0))
    before = model["head"].weight.detach().clone()
    model["head"](torch.ones(1, 2)).sum().backward()
    optimizer_step(optimizer, lr=0.0)
    assert torch.equal(model["head"].weight, before)
    optimizer_step(optimizer, lr=0.5)
    assert not torch.equal(model["head"].weight, before)


def test_the_optimizer_is_the_laws(model):
    config = TrainingConfig(weight_decay=0.25, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6)
    hyper = Hyper(lr=0.5, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.25)
    optimizer, state = build_optimizer(model, config), State.zeros(dict(model.named_parameters()))
    for scale in (1.0, 3.0):
        optimizer.zero_grad()
        model["head"](scale * torch.ones(1, 2)).square().sum().backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer_step(optimizer, lr=0.5)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        norm = float(torch.cat([g.flatten() for g in gradients.values()]).norm())
        after = {name: p.detach() for name, p in model.named_parameters()}
        memory = {name: optimizer.state[p] for name, p in model.named_parameters()}
        moments = ({n: m[kind].clone() for n, m in memory.items()} for kind in ("exp_avg", "exp_avg_sq"))
        new_state = State(state.step + 1, *moments)
        findings = judge_update(before, state, gradients, norm, after, new_state, hyper)
        assert [str(finding) for finding in findings if finding.used > 1] == []
        state = new_state

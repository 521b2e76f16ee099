"""Recomputation of one module: what is kept, what runs twice, and what the second run may not decide anew."""
# Shapes: T tokens, H hidden.

import pytest
import torch
from torch import nn

from glmv.config.features import FeaturesConfig
from glmv.model import Glm4vMoeForConditionalGeneration, ModelConfig
from glmv.model.moe import MoE
from glmv.ops import registry
from glmv.ops.kernels import Kernels
from glmv.parallel.patterns import PatternError
from glmv.train.recompute import Recomputed, apply_recompute

KINDS = pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])


@pytest.fixture
def moe(tiny_dir):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    layer = MoE(ModelConfig.from_hf_dir(tiny_dir).text, Kernels(grouped=False))
    torch.set_default_dtype(torch.float32)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.1)
    layer.gate.e_score_correction_bias.zero_()
    return layer


def fickle(router, seed=5):
    """A router that chooses other experts each time it is asked, as kernels that break near-ties differently do."""
    generator = torch.Generator().manual_seed(seed)

    def choose(choice_TE):
        return torch.rand(choice_TE.shape, generator=generator).argsort(-1)[:, :3]

    router.choose = choose


def gradients(layer, hidden_1TH):
    layer.zero_grad()
    hidden_1TH = hidden_1TH.clone().requires_grad_()
    layer(hidden_1TH).square().sum().backward()
    return [hidden_1TH.grad, *(p.grad.clone() for p in layer.parameters())]


@KINDS
def test_the_second_run_keeps_the_experts_of_the_first(reentrant, moe):
    hidden_1TH = torch.randn(1, 7, 72, dtype=torch.float64)
    fickle(moe.gate)
    once = gradients(moe, hidden_1TH)
    fickle(moe.gate)
    moe.forward = Recomputed("moe", moe, reentrant)
    assert all(torch.equal(a, b) for a, b in zip(gradients(moe, hidden_1TH), once, strict=True))


@KINDS
def test_a_module_runs_again_in_the_backward_pass(reentrant, moe):
    runs = []
    moe.shared_experts.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    moe.forward = Recomputed("moe", moe, reentrant)
    output = moe(torch.randn(1, 4, 72, dtype=torch.float64).requires_grad_())
    assert len(runs) == 1
    output.sum().backward()
    assert len(runs) == 2


def test_each_call_remembers_its_own_choice(moe):
    """Two passes before the first backward, as with several micro-batches in flight."""
    moe.forward = Recomputed("moe", moe, reentrant=False)
    inputs = [torch.randn(1, size, 72, dtype=torch.float64).requires_grad_() for size in (3, 6)]
    outputs = [moe(hidden_1TH) for hidden_1TH in inputs]
    for output in outputs:
        output.sum().backward()
    assert [hidden_1TH.grad.shape for hidden_1TH in inputs] == [(1, 3, 72), (1, 6, 72)]


def test_inputs_without_gradients_are_no_reason_to_lose_those_of_the_weights(moe, caplog):
    registry.say_once.cache_clear()
    moe.forward = Recomputed("layers.0.mlp", moe, reentrant=True)
    moe(torch.randn(1, 4, 72, dtype=torch.float64)).sum().backward()
    assert all(parameter.grad is not None for parameter in moe.parameters())
    assert "no input of layers.0.mlp has a gradient" in caplog.text


@pytest.fixture
def model(tiny_dir):
    with torch.device("meta"):
        return Glm4vMoeForConditionalGeneration(ModelConfig.from_hf_dir(tiny_dir))


def applied(model, **features):
    return apply_recompute(model, FeaturesConfig(**features))


def test_without_a_plan_every_layer_and_block_is_recomputed(model):
    blocks = [f"model.visual.blocks.{index}" for index in range(2)]
    layers = [f"model.language_model.layers.{index}" for index in range(3)]
    assert applied(model, recompute=True) == [*blocks, *layers]


def test_a_plan_names_what_is_recomputed(model):
    plan = {"apply_modules": ["model.language_model.layers.{1-2}"]}
    assert applied(model, recompute=True, recompute_plan=plan) == [f"model.language_model.layers.{n}" for n in (1, 2)]


def test_nothing_is_recomputed_unasked(model):
    assert applied(model, recompute_plan={"apply_modules": ["lm_head"]}) == []


def test_a_dead_pattern_is_refused(model):
    with pytest.raises(PatternError, match=r"features\.recompute_plan\.apply_modules: the pattern"):
        applied(model, recompute=True, recompute_plan={"apply_modules": ["model.layers"]})

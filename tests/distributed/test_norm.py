"""The gradient norm over the meshes of a real model: each parameter once, the same on every rank."""

import math

import pytest
import torch
from layouts import backward, build, everyone, gradients_of, norm_of
from rank_cases import CASES

from glmv.parallel.grad_norm import clip_grad_norm

LAYOUTS = {
    "ep2_edp2": {"ep": 2, "efsdp": 1},
    "ep2_efsdp2_hsdp": {"ep": 2, "shard": 2},
    "frozen_experts": {"ep": 4, "frozen": ["model.language_model.layers.{*}.mlp.experts"]},
    "experts_alone": {
        "ep": 4,
        "frozen": [
            "model.visual",
            "lm_head",
            "model.language_model.norm",
            "model.language_model.embed_tokens",
            "model.language_model.layers.0",
            "model.language_model.layers.{*}.*norm",
            "model.language_model.layers.{*}.self_attn",
            "model.language_model.layers.{*}.mlp.gate",
            "model.language_model.layers.{*}.mlp.shared_experts",
        ],
    },
}


@pytest.mark.world_size(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_gradient_counts_once_on_every_rank(layout, process, tiny_dir):
    model = build(tiny_dir, process, **LAYOUTS[layout])
    backward(model, CASES["all_different"], process)
    whole = torch.cat([gradient.flatten() for gradient in gradients_of(model).values()])
    norms, largest = everyone(norm_of(model)), everyone(norm_of(model, math.inf))
    assert len(set(norms)) == 1
    # One rounding per addition of the two sums at most, in either order.
    assert abs(norms[0] - float(whole.norm())) <= whole.numel() * torch.finfo(torch.float64).eps * float(whole.norm())
    assert set(largest) == {float(whole.abs().max())}


@pytest.mark.world_size(4)
def test_clipping_scales_all_gradients_by_one_number(process, tiny_dir):
    model = build(tiny_dir, process, ep=2, efsdp=1, shard=2)
    backward(model, CASES["all_different"], process)
    before = gradients_of(model)
    norm = float(clip_grad_norm(model.parameters(), 0.05))
    scale = 0.05 / (norm + 1e-6)
    for name, gradient in gradients_of(model).items():
        assert torch.equal(gradient, before[name] * scale), name


@pytest.mark.world_size(4)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_bad_expert_gradient_on_one_rank_is_seen_by_all(norm_type, process, tiny_dir):
    model = build(tiny_dir, process, ep=4)
    backward(model, CASES["all_different"], process)
    if process.rank == 3:
        model.model.language_model.layers[2].mlp.experts.down_proj.grad.to_local()[0, 0, 0] = math.nan
    assert not any(math.isfinite(norm) for norm in everyone(norm_of(model, norm_type)))

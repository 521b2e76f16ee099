"""Recomputation, for every kind of it and every frozen prefix: what can be trained gets the law's gradient."""

import pytest
import torch
from layouts import backward, build, law_of, of_trained, trained_names
from rank_cases import CASES

KINDS = {"saved": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}
FROZEN = {
    "nothing": [],
    "patch_embed": ["model.visual.patch_embed"],
    "first_blocks": ["model.visual.patch_embed", "model.visual.blocks.0"],
    "vision": ["model.visual"],
    "embed_tokens": ["model.language_model.embed_tokens"],
    "prefix": ["model.visual", "model.language_model.embed_tokens", "model.language_model.layers.{0-1}"],
    "experts": ["model.language_model.layers.{*}.mlp.experts"],
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", FROZEN)
def test_what_is_trained_gets_the_laws_gradient(frozen, kind, process, tiny_dir, judge):
    features = {"recompute": True, "recompute_plan": KINDS[kind]}
    model = build(tiny_dir, process, ep=2, frozen=FROZEN[frozen], features=features)
    said = backward(model, CASES["all_different"], process)
    assert said.keys() - {"loss"} == trained_names(model)
    if process.is_main:
        judge(said, of_trained(law_of(tiny_dir).of(CASES["all_different"]), said), torch.float64)


@pytest.mark.world_size(2)
def test_recomputed_layers_exchange_their_rows_again(process, tiny_dir):
    def rows(features):
        model = build(tiny_dir, process, ep=2, features=features)
        backward(model, CASES["all_different"], process)
        return model.model.language_model.layers[1].mlp.experts.dispatcher.traffic.rows

    # There and back: once forward and once backward, and once more forward.
    assert 2 * rows({"recompute": True}) == 3 * rows({})

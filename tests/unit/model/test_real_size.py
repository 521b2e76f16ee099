"""The published 106B model, on the meta device: no memory, no time."""

import json
from pathlib import Path

import pytest
import torch

from glmv.model import Glm4vMoeForConditionalGeneration, ModelConfig
from spec import layout

REAL = json.loads((Path(__file__).parents[2] / "data" / "glm45v_config.json").read_text())


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        return Glm4vMoeForConditionalGeneration(ModelConfig.from_hf(REAL))


def test_parameters(model):
    assert sum(p.numel() for p in model.parameters()) == 107_710_927_360


def test_router_bias_is_a_persistent_fp32_buffer(model):
    names = [name for name in model.state_dict() if name.endswith("e_score_correction_bias")]
    biases = [model.get_buffer(name) for name in names]
    assert sum(b.numel() for b in biases) == 45 * 128 == 5_760
    assert {b.dtype for b in biases} == {torch.float32}


def test_tensors_of_the_published_files(model):
    assert len(layout.per_expert(model.state_dict())) == 18_106


SHAPES = {
    "lm_head.weight": (151552, 4096),
    "model.language_model.layers.45.self_attn.q_proj.weight": (12288, 4096),
    "model.language_model.layers.0.mlp.gate_proj.weight": (10944, 4096),
    "model.language_model.layers.1.mlp.experts.127.up_proj.weight": (1408, 4096),
    "model.language_model.layers.1.mlp.experts.127.down_proj.weight": (4096, 1408),
    "model.language_model.layers.1.mlp.gate.weight": (128, 4096),
    "model.visual.patch_embed.proj.weight": (1536, 3, 2, 14, 14),
    "model.visual.embeddings.position_embedding.weight": (576, 1536),
    "model.visual.blocks.23.attn.qkv.weight": (4608, 1536),
    "model.visual.blocks.0.mlp.down_proj.weight": (1536, 4096),
    "model.visual.downsample.weight": (4096, 1536, 2, 2),
    "model.visual.merger.post_projection_norm.bias": (4096,),
    "model.visual.merger.gate_proj.weight": (10944, 4096),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shape(name, model):
    assert layout.per_expert(model.state_dict())[name].shape == SHAPES[name]


def test_only_frequencies_are_not_in_the_checkpoint(model):
    lost = {name for name, _ in model.named_buffers()} - model.state_dict().keys()
    assert lost == {"model.visual.rotary_pos_emb.inv_freq", "model.language_model.rotary_emb.inv_freq"}

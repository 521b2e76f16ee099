"""Rounding points that a comparison within bf16 noise does not see, by exact cases."""

import pytest
import torch

BF16, FP32, FLOAT64 = torch.bfloat16, torch.float32, torch.float64
ANGLES = torch.arange(8)[:, None].expand(8, 2)


@pytest.fixture
def model(tiny):
    return tiny.model(BF16)


def test_text_angles_are_computed_in_fp32_and_rounded_once(model):
    rotary = model.model.language_model.rotary_emb
    position = torch.arange(300).expand(3, 1, -1)
    wide, narrow = rotary(position, FP32), rotary(position, BF16)
    assert all(n.equal(w.to(BF16)) for n, w in zip(narrow, wide))


def test_vision_angles_stay_fp32(model):
    cos, sin = model.model.visual.rotary_pos_emb(ANGLES, FP32)
    assert cos.dtype == sin.dtype == FP32


def test_a_vision_block_turns_by_fp32_angles(model):
    visual = model.model.visual
    cos, sin = visual.rotary_pos_emb(ANGLES, FP32)
    hidden = torch.randn(8, visual.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(BF16)
    rounded = visual.blocks[0](hidden, [8], cos.to(BF16).float(), sin.to(BF16).float())
    assert not visual.blocks[0](hidden, [8], cos, sin).equal(rounded)


def test_a_vision_block_casts_hidden_states_itself(model):
    visual = model.model.visual
    angles = visual.rotary_pos_emb(ANGLES, FP32)
    hidden = torch.randn(8, visual.config.hidden_size)
    assert visual.blocks[0](hidden, [8], *angles).equal(visual.blocks[0](hidden.to(BF16), [8], *angles))


def test_experts_cast_hidden_states_themselves(model, tiny):
    experts = model.model.language_model.layers[1].mlp.experts
    hidden, index, weight = torch.randn(5, tiny.config.text.hidden_size), torch.zeros(5, 1).long(), torch.rand(5, 1)
    assert experts(hidden, index, weight).equal(experts(hidden.to(BF16), index, weight))


@pytest.mark.parametrize(("dtype", "scored"), [(BF16, FP32), (FP32, FP32), (FLOAT64, FLOAT64)])
def test_routing_weights_are_at_least_fp32(dtype, scored, tiny):
    router = tiny.model(dtype).model.language_model.layers[1].mlp.gate
    assert router(torch.randn(5, tiny.config.text.hidden_size, dtype=dtype))[1].dtype == scored

import pytest
import torch
from model_cases import answers, make_batch

from glmv.model import Glm4vMoeForConditionalGeneration
from glmv.ops.rope import inverse_frequencies
from spec.numerics import Policy
from spec.rope import frequencies

BIAS = "model.language_model.layers.1.mlp.gate.e_score_correction_bias"
GATE = "model.language_model.layers.1.mlp.gate.weight"
FREQUENCIES = ["model.visual.rotary_pos_emb.inv_freq", "model.language_model.rotary_emb.inv_freq"]


@pytest.fixture
def materialised(tiny):
    """Built on meta, moved to real but uninitialised memory, loaded: the buffers that no checkpoint holds are 7e7."""
    with torch.device("meta"):
        model = Glm4vMoeForConditionalGeneration(tiny.config)
    model.to_empty(device="cpu")
    for name in FREQUENCIES:
        model.get_buffer(name).fill_(7e7)
    model.load_state_dict(tiny.model(torch.float32).state_dict())
    return model


def test_reset_restores_every_buffer(materialised, tiny):
    materialised.reset_buffers()
    plain = tiny.model(torch.float32)
    assert {name for name, _ in plain.named_buffers()} == {name for name, _ in materialised.named_buffers()}
    for name, buffer in plain.named_buffers():
        assert materialised.get_buffer(name).equal(buffer), name


def test_frequencies_by_hand(tiny):
    text, vision = (tiny.model(torch.float32).get_buffer(name) for name in reversed(FREQUENCIES))
    assert text.equal(1 / 10000.0 ** (torch.arange(0, 16, 2) / 16))  # head dim 32, half of it turns
    assert vision.equal(1 / 10000.0 ** (torch.arange(0, 6, 2) / 6))  # head dim 12, half for rows and half for columns


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [BIAS, GATE, *FREQUENCIES])
def test_what_must_be_fp32_stays_fp32_in_a_narrower_model(name, narrow, tiny):
    model = tiny.model(torch.float32)
    before = model.state_dict(keep_vars=True).get(name, dict(model.named_buffers()).get(name)).clone()
    after = model.to(narrow).state_dict(keep_vars=True).get(name, dict(model.named_buffers()).get(name))
    assert after.dtype == torch.float32
    assert after.equal(before)
    assert model.lm_head.weight.dtype == narrow


def test_a_float64_model_has_float64_frequencies(tiny):
    exact = 1 / 10000.0 ** (torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    assert tiny.model(torch.float64).get_buffer(FREQUENCIES[1]).equal(exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FREQUENCIES)
def test_frequencies_rounded_to_bf16_stay_in_a_wide_buffer(name, dtype, tiny):
    model = tiny.model(dtype)
    exact = model.get_buffer(name).clone()
    model.reset_buffers(torch.bfloat16)
    rounded = model.get_buffer(name)
    assert rounded.dtype == dtype
    assert rounded.equal(exact.bfloat16().to(dtype))
    assert not rounded.equal(exact)


@pytest.mark.parametrize("dim", [64, 128, 16, 6])
def test_rounded_frequencies_are_the_laws(dim):
    machine = inverse_frequencies(10000.0, dim).bfloat16()
    assert machine.double().equal(frequencies(dim, 10000.0, Policy(buffers=torch.bfloat16)))


def test_rounding_outlasts_a_change_of_dtype_and_ends_with_a_reset(tiny):
    model = tiny.model(torch.float32)
    exact = model.get_buffer(FREQUENCIES[1]).clone()
    model.reset_buffers(torch.bfloat16)
    assert model.double().get_buffer(FREQUENCIES[1]).equal(exact.bfloat16().double())
    model.float().reset_buffers()
    assert model.get_buffer(FREQUENCIES[1]).equal(exact)


def test_the_model_with_rounded_frequencies(tiny, judge):
    batch, model = make_batch("image_and_video_padded_right"), tiny.model(torch.float64)
    model.reset_buffers(torch.bfloat16)
    said, chosen = answers(model, batch)
    law = tiny.law(batch, chosen)
    judge(said, lambda policy: law(Policy(policy.compute, policy.draw, torch.bfloat16)), torch.float64)

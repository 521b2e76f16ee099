import pytest
import torch

from glmv.model import Glm4vMoeForConditionalGeneration

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

"""How often the host waits for the device: never in a layer, nor in the pass of a whole micro-batch."""

import pytest
import torch
from model_cases import SAMPLES, cu_seqlens, make_batch

from glmv.model.inputs import OnHost
from glmv.ops.attention import Visible, causal_mask
from glmv.ops.kernels import Kernels
from glmv.ops.loss import cross_entropy, shift

BF16 = torch.bfloat16
FLASH = Kernels(attention="flash")
SEEN = {
    "plain": lambda device: Visible(),
    "padded": lambda device: Visible(causal_mask(torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]], device=device).bool())),
    "packed": lambda device: Visible(documents=[3, 4]),
}


@pytest.fixture(scope="module")
def model(tiny, device):
    return tiny.model(BF16, device, FLASH)


def forward_and_backward(count, module, hidden, *args):
    """What the host waited for."""
    grad = torch.ones_like(hidden)
    with count() as counted:
        module(hidden.requires_grad_(), *args).backward(grad)
    return counted.sync_causes


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("layer", [0, 1], ids=["dense", "experts"])
def test_a_decoder_layer(layer, seen, model, tiny, device, count):
    text = model.model.language_model
    hidden = torch.randn(1, 8, tiny.config.text.hidden_size, dtype=BF16).to(device)
    angles = text.rotary_emb(torch.arange(8, device=device).expand(3, 1, -1), BF16)
    assert forward_and_backward(count, text.layers[layer], hidden, *angles, SEEN[seen](device)) == {}


def test_a_vision_block(model, tiny, device, count):
    visual = model.model.visual
    hidden = torch.randn(12, tiny.config.vision.hidden_size, dtype=BF16).to(device)
    angles = visual.rotary_pos_emb(torch.arange(12, device=device)[:, None].expand(-1, 2), torch.float32)
    assert forward_and_backward(count, visual.blocks[0], hidden, [8, 4], *angles) == {}


def given(batch, device):
    """A micro-batch as `Batch.to` and `Batch.model_inputs` give it to the model."""
    host = {
        "attention_mask_BS": batch.attention_mask,
        "mm_token_type_ids_BS": batch.mm_token_type_ids,
        "image_grid_thw": batch.image_grid_thw,
        "video_grid_thw": batch.video_grid_thw,
        "cu_seqlens": cu_seqlens(batch),
    }
    pixels = {"pixel_values_NP": batch.pixel_values, "pixel_values_videos_NP": batch.pixel_values_videos}
    return {
        "input_ids_BS": batch.input_ids.to(device),
        **{name: OnHost(value) for name, value in host.items() if value is not None},
        **{name: value.to(device, BF16) for name, value in pixels.items() if value is not None},
    }


@pytest.mark.parametrize("case", SAMPLES)
def test_the_pass_of_a_micro_batch(case, model, device, count):
    batch = make_batch(case)
    inputs, labels, share = given(batch, device), batch.labels.to(device), (shift(batch.labels) != -100).double()
    with count() as counted:
        cross_entropy(model(**inputs), labels, share).backward()
    assert counted.sync_causes == {}


def test_what_the_host_should_have_kept_is_fetched_and_that_is_counted(model, device, count):
    """The counter sees what the tests above say is not there."""
    inputs = given(make_batch("padded_right"), device)
    inputs["attention_mask_BS"] = inputs["attention_mask_BS"].tensor.to(device)
    with count() as counted, torch.no_grad():
        model(**inputs)
    assert counted.sync_causes == {"copy to the host": 1}

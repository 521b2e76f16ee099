"""What the model refuses, and what it must not notice."""

import dataclasses

import pytest
import torch
from model_cases import make_batch, run

from glmv.model import ConfigError, Glm4vMoeForConditionalGeneration
from glmv.model.positions import InputError


def broken(**changes):
    return dataclasses.replace(make_batch("one_image"), **changes)


WITHOUT_PIXELS = {"pixel_values": None, "image_grid_thw": None}
FAULTS = {
    "one_token_less": (
        {"mm_token_type_ids": torch.tensor([[0] * 4 + [1] * 5 + [0] * 4])},
        "marks 5 tokens, image_grid_thw describes 6 features",
    ),
    "no_pixels": (WITHOUT_PIXELS, "marks 6 tokens, image_grid_thw describes 0 features"),
    "no_grid": ({"image_grid_thw": None}, "pixel_values and image_grid_thw come together"),
    "patches": ({"pixel_values": torch.zeros(20, 1176)}, "pixel_values has 20 patches, image_grid_thw describes 24"),
    "odd_grid": (
        {"image_grid_thw": torch.tensor([[1, 3, 8]])},
        r"\[1, 3, 8\]: rows and columns must be .* 2",
    ),
    "empty_grid": ({"image_grid_thw": torch.tensor([[0, 4, 6]])}, r"\[0, 4, 6\]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_batch_that_does_not_fit_is_refused(fault, tiny):
    changes, message = FAULTS[fault]
    with pytest.raises(InputError, match=message):
        run(tiny.model(torch.float32), broken(**changes))


def test_token_types_are_required_with_images(tiny):
    batch = make_batch("one_image")
    with pytest.raises(InputError, match=r"marks 0 tokens.*\n.*Give mm_token_type_ids"):
        tiny.model(torch.float32)(
            batch.input_ids, pixel_values_NP=batch.pixel_values, image_grid_thw=batch.image_grid_thw
        )


def test_an_unknown_attention(tiny):
    with pytest.raises(ConfigError, match=r"attn_implementation = 'flex' is not built\. Choose eager or sdpa"):
        Glm4vMoeForConditionalGeneration(tiny.config, attn_implementation="flex")


def test_ids_of_image_tokens_do_not_matter(tiny):
    model, batch = tiny.model(torch.float32), make_batch("one_image")
    other = batch.input_ids.masked_fill(batch.mm_token_type_ids == 1, 3)
    assert run(model, dataclasses.replace(batch, input_ids=other)).equal(run(model, batch))


def test_a_mask_of_ones_is_no_mask(tiny):
    model, batch = tiny.model(torch.float32), make_batch("text")
    assert model(batch.input_ids).equal(run(model, batch))


@pytest.mark.parametrize("case", ["padded_left", "padded_right"])
def test_no_real_token_looks_back_at_padding(case, tiny):
    """Gradient of the real logits with respect to the embeddings of padding."""
    model, batch = tiny.model(torch.float64), make_batch(case)
    embedded = []
    model.model.language_model.embed_tokens.register_forward_hook(lambda *args: embedded.append(args[-1]))
    logits = run(model, batch)
    (grad_BSH,) = torch.autograd.grad(logits[batch.attention_mask.bool()].square().sum(), embedded)
    assert not grad_BSH[batch.attention_mask == 0].any()
    assert grad_BSH[(batch.attention_mask == 1) & (batch.mm_token_type_ids == 0)].any()

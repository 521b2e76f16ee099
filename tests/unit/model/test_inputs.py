"""What the model refuses, and what it must not notice."""

import dataclasses

import pytest
import torch
from model_cases import make_batch, run

from glmv.model import ConfigError, Glm4vMoeForConditionalGeneration
from glmv.model.positions import InputError
from glmv.ops.kernels import Kernels


def broken(**changes):
    return dataclasses.replace(make_batch("one_image"), **changes)


WITHOUT_PIXELS = {"pixel_values": None, "image_grid_thw": None}
FAULTS = {
    "one_token_less": (
        {"mm_token_type_ids": torch.tensor([[0] * 4 + [1] * 5 + [0] * 4])},
        "marks 5 tokens with 1, image_grid_thw describes 6 features",
    ),
    "no_pixels": (WITHOUT_PIXELS, "marks 6 tokens with 1, image_grid_thw describes 0 features"),
    "no_grid": ({"image_grid_thw": None}, "pixel_values and image_grid_thw come together"),
    "patches": ({"pixel_values": torch.zeros(20, 1176)}, "pixel_values has 20 patches, image_grid_thw describes 24"),
    "odd_grid": (
        {"image_grid_thw": torch.tensor([[1, 3, 8]])},
        r"\[1, 3, 8\]: rows and columns must be .* 2",
    ),
    "video_tokens": (
        {"mm_token_type_ids": torch.tensor([[0] * 3 + [2] * 6 + [0] * 4])},
        "marks 0 tokens with 1, image_grid_thw describes 6 features",
    ),
    "image_as_video": (
        {**WITHOUT_PIXELS, "pixel_values_videos": torch.zeros(24, 1176), "video_grid_thw": torch.tensor([[1, 4, 6]])},
        "image tokens and image features .* marks 6 tokens with 1, image_grid_thw describes 0",
    ),
    "videos_without_grid": (
        {"pixel_values_videos": torch.zeros(8, 1176)},
        "pixel_values_videos and video_grid_thw come",
    ),
    "a_third_kind": ({"mm_token_type_ids": torch.tensor([[0] * 4 + [3] * 5 + [0] * 4])}, "mm_token_type_ids has a 3"),
    "media_in_padding": (
        {"attention_mask": torch.tensor([[0] * 5 + [1] * 8])},
        "marks 4 tokens with 1, image_grid_thw describes 6 features",
    ),
    "empty_grid": ({"image_grid_thw": torch.tensor([[0, 4, 6]])}, r"\[0, 4, 6\]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_batch_that_does_not_fit_is_refused(fault, tiny):
    changes, message = FAULTS[fault]
    with pytest.raises(InputError, match=message):
        run(tiny.model(torch.float32), broken(**changes))


BORDERS = {
    "does_not_start_at_0": ([1, 13], None, r"cu_seqlens = \[1, 13\] must rise from 0 to at most the 13 tokens"),
    "falls": ([0, 5, 4], None, "must rise"),
    "empty_document": ([0, 5, 5, 13], None, "must rise"),
    "too_long": ([0, 14], None, "must rise"),
    "no_document": ([0], None, "must rise"),
    "mask": ([0, 4, 9], [1] * 10 + [0] * 3, "the documents end at 9, so the mask must be 1 up to there and 0 behind"),
}


@pytest.mark.parametrize("fault", BORDERS)
def test_documents_that_do_not_fit_are_refused(fault, tiny):
    borders, mask, message = BORDERS[fault]
    ids, mask = torch.ones(1, 13, dtype=torch.int64), None if mask is None else torch.tensor([mask])
    with pytest.raises(InputError, match=message):
        tiny.model(torch.float32)(ids, attention_mask_BS=mask, cu_seqlens=torch.tensor(borders, dtype=torch.int32))


def test_documents_of_two_rows_are_refused(tiny):
    with pytest.raises(InputError, match="one row of packed documents, and the batch has 2"):
        tiny.model(torch.float32)(torch.ones(2, 4, dtype=torch.int64), cu_seqlens=torch.tensor([0, 4]).int())


def test_token_types_are_required_with_images(tiny):
    batch = make_batch("one_image")
    with pytest.raises(InputError, match=r"marks 0 tokens with 1.*\n.*Give mm_token_type_ids"):
        tiny.model(torch.float32)(
            batch.input_ids, pixel_values_NP=batch.pixel_values, image_grid_thw=batch.image_grid_thw
        )


def test_an_unknown_attention(tiny):
    with pytest.raises(ConfigError, match=r"attn_implementation = 'flex' is not built\. Choose eager or sdpa or flash"):
        Glm4vMoeForConditionalGeneration(tiny.config, Kernels(attention="flex"))


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

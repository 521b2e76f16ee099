"""Samples side by side."""

import inspect

import torch

from glmv.data import collate
from glmv.model.glm4v_moe import Glm4vMoeForConditionalGeneration


def test_short_samples_are_filled_up_on_the_right(load, talk):
    long, short = load([talk("q", "a b c d"), talk("q", "a")])
    batch = collate([short, long], pad_token_id=581)
    missing = len(long.input_ids) - len(short.input_ids)
    assert missing > 0
    assert batch.input_ids.tolist() == [short.input_ids.tolist() + [581] * missing, long.input_ids.tolist()]
    assert batch.labels.tolist() == [short.labels.tolist() + [-100] * missing, long.labels.tolist()]
    assert batch.attention_mask.tolist() == [[1] * len(short.input_ids) + [0] * missing, [1] * len(long.input_ids)]
    assert batch.sample_ids == ("d.json[1]", "d.json[0]")


def test_pictures_follow_the_order_of_samples(load, talk, picture):
    one = talk("<image>", "yes", images=[picture("a.png", (112, 56))])
    two = talk("<image><image>", "yes", images=[picture("b.png", (56, 112)), picture("c.png", (84, 84))])
    first, text, second = load([one, talk("q", "yes"), two])
    batch = collate([second, text, first], pad_token_id=0)
    assert batch.image_grid_thw.tolist() == [[1, 8, 4], [1, 6, 6], [1, 4, 8]]
    assert batch.pixel_values.equal(torch.cat([second.pixel_values, first.pixel_values]))
    assert batch.mm_token_type_ids.sum(-1).tolist() == [8 + 9, 0, 8]


def test_a_batch_of_texts_has_no_pixels(load, talk):
    batch = collate(load([talk("q", "yes")]), pad_token_id=0)
    assert batch.pixel_values is batch.image_grid_thw is None
    assert batch.to(torch.device("cpu")).pixel_values is None


def test_model_inputs_are_the_models_own_parameters(load, talk):
    given = collate(load([talk("q", "yes")]), pad_token_id=0).model_inputs()
    taken = inspect.signature(Glm4vMoeForConditionalGeneration.forward).parameters
    assert set(given) == set(taken) - {"self"}


def test_filling_uses_the_tokenizers_pad_token(load, talk, tokenizer):
    assert load([talk("q", "yes")]).pad_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>")


def test_every_tensor_moves(load, talk, picture):
    batch = collate(load([talk("<image>", "yes", images=[picture()])]), pad_token_id=0).to(torch.device("meta"))
    assert {name: value.device.type for name, value in batch.model_inputs().items()} == dict.fromkeys(
        batch.model_inputs(), "meta"
    )
    assert batch.labels.device.type == "meta"

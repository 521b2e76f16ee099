"""Samples side by side."""

import inspect

import pytest
import torch
from torch.distributed.utils import _to_kwargs

from glmv.data import DataError, Sample, collate, pack
from glmv.model.glm4v_moe import Glm4vMoeForConditionalGeneration
from glmv.model.inputs import OnHost


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
    assert set(given) == set(taken) - {"self", "targets"}


def test_filling_uses_the_tokenizers_pad_token(load, talk, tokenizer):
    assert load([talk("q", "yes")]).pad_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>")


def test_what_the_device_computes_with_moves_and_what_the_host_plans_by_stays():
    batch = pack([with_video(4, [[2, 2, 2]], torch.zeros(1))], pad_token_id=0).to(torch.device("meta"))
    moved = {name for name, value in vars(batch).items() if isinstance(value, torch.Tensor) and value.is_meta}
    assert moved == {"input_ids", "labels", "pixel_values", "pixel_values_videos"}


def test_fsdp_leaves_what_the_host_plans_by_where_it_is():
    given = pack([with_video(4, [[2, 2, 2]], torch.zeros(1))], pad_token_id=0).model_inputs()
    sent = _to_kwargs((), given, torch.device("meta"), False)[1][0]
    host = {name for name, value in sent.items() if isinstance(value, OnHost) and value.tensor.device.type == "cpu"}
    assert host == {"attention_mask_BS", "mm_token_type_ids_BS", "image_grid_thw", "video_grid_thw", "cu_seqlens"}


def with_video(length, grid, mark):
    """A sample of so many tokens, each of whose pictures and videos is told by its pixels' value."""
    ids = torch.arange(length) + 10
    grid = torch.tensor(grid)
    pixels = mark.expand(int(grid.prod(-1).sum()), 1176)
    return Sample(f"s{length}", ids, ids.clone(), torch.zeros_like(ids), pixels, grid, -pixels, grid)


def test_videos_follow_the_order_of_samples():
    one, two = with_video(3, [[2, 2, 2]], torch.ones(1)), with_video(4, [[1, 2, 4]], torch.ones(1) * 2)
    for batch in (collate([two, one], 0), pack([two, one], 0)):
        assert batch.video_grid_thw.tolist() == [[1, 2, 4], [2, 2, 2]]
        assert batch.pixel_values_videos[:, 0].tolist() == [-2] * 8 + [-1] * 8


def test_nobody_predicts_the_first_label_of_a_sample():
    samples = [with_video(n, [[1, 2, 2]], torch.ones(1)) for n in (3, 2)]
    assert collate(samples, 0).labels.tolist() == [[-100, 11, 12], [-100, 11, -100]]
    assert pack(samples, 0, length=7).labels.tolist() == [[-100, 11, 12, -100, 11, -100, -100]]


def test_a_packed_row():
    batch = pack([with_video(n, [[1, 2, 2]], torch.ones(1)) for n in (3, 2)], pad_token_id=5, length=7)
    assert batch.input_ids.tolist() == [[10, 11, 12, 10, 11, 5, 5]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 0, 0]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, -1, -1]]
    assert batch.sample_ids == ("s3", "s2")


def test_a_row_that_is_too_short():
    with pytest.raises(DataError, match="s3, s2: 5 tokens do not fit into a row of 4"):
        pack([with_video(n, [[1, 2, 2]], torch.ones(1)) for n in (3, 2)], 0, length=4)

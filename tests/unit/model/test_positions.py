import pytest
import torch
from model_cases import MERGE, SAMPLES, make_batch

from glmv.model.positions import InputError, mrope_positions
from spec import rope


@pytest.mark.parametrize("case", SAMPLES)
def test_positions_are_the_laws(case):
    batch = make_batch(case)
    mine = mrope_positions(batch.mm_token_type_ids, batch.image_grid_thw, MERGE, batch.attention_mask)
    law = rope.mrope_positions(batch.documents, batch.mm_token_type_ids, batch.grids, MERGE)
    assert mine.equal(law)


def test_an_image_by_hand():
    types = torch.tensor([[0] * 3 + [1] * 6 + [0] * 2])
    t, h, w = mrope_positions(types, torch.tensor([[1, 4, 6]]), MERGE)[:, 0].tolist()
    assert t == [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7]
    assert h == [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7]
    assert w == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("mask", [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0]], ids=str)
def test_padding_takes_no_position(mask):
    position = mrope_positions(torch.zeros(1, 5, dtype=torch.int64), None, MERGE, torch.tensor([mask]))
    real = torch.tensor(mask).bool()
    assert position[:, 0, real].tolist() == [[0, 1, 2]] * 3
    assert not position[:, 0, ~real].any()


def test_each_temporal_patch_of_a_video_is_an_image_of_its_own():
    types = torch.tensor([[0, 2, 2, 0, 2, 2, 0]])  # the second frame follows its timestamp
    t, h, w = mrope_positions(types, torch.tensor([[2, 2, 4]]), MERGE)[:, 0].tolist()
    assert t == [0, 1, 1, 3, 4, 4, 6]
    assert h == [0, 1, 1, 3, 4, 4, 6]
    assert w == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("grid", [[1, 4, 4], [1, 2, 4]], ids=["too_large", "too_small"])
def test_a_run_of_image_tokens_that_no_image_fills(grid):
    types = torch.tensor([[0, 1, 1, 1, 0]])
    with pytest.raises(InputError, match=r"sample 0 .* a run of image tokens has [13] left .* has [04] features"):
        mrope_positions(types, torch.tensor([grid]), MERGE)

import pytest
import torch
from model_cases import MERGE, SAMPLES, cu_seqlens, make_batch

from glmv.model.positions import IMAGE, VIDEO, InputError, mrope_positions
from glmv.ops.documents import document_ids
from spec import rope


def positions(types, grids=None, mask=None, borders=None):
    types = torch.tensor([types])
    mask = torch.ones_like(types) if mask is None else torch.tensor([mask])
    borders = None if borders is None else torch.tensor(borders, dtype=torch.int32)
    grids = {kind: torch.tensor(grid) for kind, grid in (grids or {}).items()}
    return mrope_positions(types, grids, MERGE, document_ids(mask, borders))[:, 0]


@pytest.mark.parametrize("case", SAMPLES)
def test_positions_are_the_laws(case):
    batch = make_batch(case)
    documents = document_ids(batch.attention_mask, cu_seqlens(batch))
    mine = mrope_positions(batch.mm_token_type_ids, batch.grids, MERGE, documents)
    law = rope.mrope_positions(batch.documents, batch.mm_token_type_ids, batch.grids, MERGE)
    assert mine.equal(law)


def test_an_image_by_hand():
    t, h, w = positions([0] * 3 + [1] * 6 + [0] * 2, {IMAGE: [[1, 4, 6]]}).tolist()
    assert t == [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7]
    assert h == [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7]
    assert w == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("mask", [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0]], ids=str)
def test_padding_takes_no_position(mask):
    position, real = positions([0] * 5, mask=mask), torch.tensor(mask).bool()
    assert position[:, real].tolist() == [[0, 1, 2]] * 3
    assert not position[:, ~real].any()


def test_each_temporal_patch_of_a_video_is_a_picture_of_its_own():
    t, h, w = positions([0, 2, 2, 0, 2, 2, 0], {VIDEO: [[2, 2, 4]]}).tolist()  # the second follows its timestamp
    assert t == [0, 1, 1, 3, 4, 4, 6]
    assert h == [0, 1, 1, 3, 4, 4, 6]
    assert w == [0, 1, 2, 3, 4, 5, 6]


def test_temporal_patches_without_text_between():
    t, _, w = positions([2, 2, 2, 2, 0], {VIDEO: [[2, 2, 4]]}).tolist()
    assert (t, w) == ([0, 0, 2, 2, 4], [0, 1, 2, 3, 4])


def test_images_and_videos_each_have_their_own_grids():
    t, h, w = positions([2, 2, 1, 1, 0, 2], {IMAGE: [[1, 4, 2]], VIDEO: [[1, 2, 4], [1, 2, 2]]}).tolist()
    assert t == [0, 0, 2, 2, 4, 5]
    assert h == [0, 0, 2, 3, 4, 5]
    assert w == [0, 1, 2, 2, 4, 5]


def test_every_packed_document_starts_at_0():
    t, h, w = positions([0, 0, 0, 1, 1, 0, 0, 0], {IMAGE: [[1, 2, 4]]}, borders=[0, 2, 6, 7]).tolist()
    assert t == [0, 1, 0, 1, 1, 3, 0, 0]
    assert h == t
    assert w == [0, 1, 0, 1, 2, 3, 0, 0]


@pytest.mark.parametrize("grid", [[1, 4, 4], [1, 2, 4]], ids=["too_large", "too_small"])
def test_a_run_of_image_tokens_that_no_image_fills(grid):
    with pytest.raises(InputError, match=r"sample 0 .* a run of image tokens has [13] left .* has [04] features"):
        positions([0, 1, 1, 1, 0], {IMAGE: [grid]})


def test_a_document_boundary_inside_an_image():
    with pytest.raises(InputError, match=r"a run of video tokens has 2 left .* video_grid_thw has 4 features"):
        positions([2, 2, 2, 2], {VIDEO: [[1, 4, 4]]}, borders=[0, 2, 4])

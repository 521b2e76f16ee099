import pytest
import torch
from model_cases import PIXELS, gradients, make_batch, run

from glmv.model.position_embedding import interpolate
from glmv.model.vision import patch_coordinates, segment_lengths
from glmv.ops.kernels import Kernels


def test_patches_come_in_blocks():
    coordinates, sizes = patch_coordinates([(1, 2, 4)], merge=2)
    assert coordinates.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert sizes.tolist() == [[2, 4]] * 8


def test_every_temporal_patch_is_a_segment():
    assert segment_lengths([(1, 2, 4), (3, 4, 2)]) == [8, 8, 8, 8]
    assert patch_coordinates([(3, 4, 2)], merge=2)[0].shape == (24, 2)


def test_positions_of_a_grid_like_the_table_are_the_table():
    table = torch.randn(36, 5, dtype=torch.float64)
    coordinates, sizes = patch_coordinates([(1, 6, 6)], merge=1)
    assert interpolate(table, coordinates, sizes).equal(table)


def test_positions_are_interpolated_in_fp32_and_rounded_once():
    table = torch.randn(36, 5).bfloat16()
    places = patch_coordinates([(1, 4, 10)], merge=2)
    assert interpolate(table, *places).equal(interpolate(table.float(), *places).bfloat16())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_images_do_not_see_each_other(implementation, tiny):
    tower = tiny.model(torch.float32, kernels=Kernels(attention=implementation)).model.visual
    grids = torch.tensor([[1, 4, 2], [2, 2, 4], [1, 2, 2]])
    pixels = torch.randn(28, PIXELS, generator=torch.Generator().manual_seed(0))
    changed = pixels.clone()
    changed[8:16] = 9.0  # the first temporal patch of the second image
    same = tower(pixels, grids).eq(tower(changed, grids)).all(-1)
    assert same.tolist() == [True] * 2 + [False] * 2 + [True] * 3


def test_a_batch_without_images_still_gives_the_tower_gradients_of_zero(tiny):
    model = tiny.model(torch.float32)
    run(model, make_batch("text")).square().sum().backward()
    vision = {name: grad for name, grad in gradients(model).items() if name.startswith("model.visual.")}
    assert len(vision) == sum(name.startswith("model.visual.") for name in tiny.weights)
    assert not any(grad.any() for grad in vision.values())


def test_the_tower_runs_for_text_but_changes_nothing(tiny):
    model, batch = tiny.model(torch.float32), make_batch("text")
    seen = []
    model.model.visual.register_forward_hook(lambda *_: seen.append(True))
    logits = run(model, batch)
    with torch.no_grad():
        for parameter in model.model.visual.parameters():
            parameter.mul_(3)
    assert run(model, batch).equal(logits)
    assert seen == [True, True]


@pytest.mark.parametrize("case", ["one_image", "video", "image_and_video_padded_right"])
def test_images_and_videos_go_through_the_tower_at_once(case, tiny):
    model, batch = tiny.model(torch.float32), make_batch(case)
    seen = []
    model.model.visual.register_forward_hook(lambda _, args, out: seen.append(len(out)))
    run(model, batch)
    assert seen == [int((batch.mm_token_type_ids != 0).sum())]


def test_a_frozen_tower_gets_no_gradient(tiny):
    model = tiny.model(torch.float32)
    model.model.visual.requires_grad_(False)
    run(model, make_batch("text")).sum().backward()
    assert all(parameter.grad is None for parameter in model.model.visual.parameters())
    assert model.model.language_model.norm.weight.grad.any()

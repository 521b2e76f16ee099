"""The example of examples/pictures is complete, and of the variety that it promises."""

from pathlib import Path

import pytest

from glmv.config import load_config, unbuilt
from glmv.data import load_samples

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def config():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # the example's paths are relative to the repository
        yield load_config("examples/pictures/train.yaml")


@pytest.fixture(scope="module")
def samples(config, tiny_dir):
    return load_samples(config.data, tiny_dir)


def test_it_asks_for_nothing_that_is_not_built(config):
    assert unbuilt(config) == []


def test_every_sample_is_used_in_full_length(config, samples):
    assert (len(samples), samples.dropped) == (24, ())
    assert max(len(sample.input_ids) for sample in samples) < config.data.dataset_param.basic_parameters.cutoff_len


def test_it_has_texts_and_one_to_three_pictures_of_different_shape(samples):
    grids = [[] if sample.image_grid_thw is None else sample.image_grid_thw.tolist() for sample in samples]
    assert sorted({len(grid) for grid in grids}) == [0, 1, 2, 3]
    assert sum(not grid for grid in grids) == 5
    assert any(len(grid) == 2 and grid[0] != grid[1] for grid in grids)
    assert {h * w // 4 for grid in grids for _, h, w in grid} == {21, 24, 25}


def test_every_turn_ends_in_the_user_token(samples, tokenizer):
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    stops = [int((sample.labels == user).sum()) for sample in samples]
    assert all(sample.labels[-1] == user for sample in samples)
    assert sorted(stops) == [1] * 21 + [2] * 3

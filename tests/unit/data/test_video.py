"""Frames become what the law and transformers' processors say."""

import importlib

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

from glmv.data import DataError
from glmv.data.images import PictureReader
from glmv.data.video import VideoReader, media_types, padded_places, patch_seconds, video_text
from spec.rope import mrope_positions
from spec.video import padded_frames, temporal_patches, timestamps, video_token_types, video_tokens

COUNTS = [1, 2, 3, 7, 18, 65]
SIZES = [2, 4]
RATES = [1, 2, 29.97]
HfVideoProcessor = importlib.import_module("transformers.models.glm4v.video_processing_glm4v").Glm4vVideoProcessor
AREA = {"max_pixels": 256 * 256, "min_pixels": 16 * 16}


def clip(count, size=(56, 28)):
    """Frames of noise, so that no two places or times are alike."""
    return np.random.default_rng(count).integers(0, 256, (count, size[1], size[0], 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def reader_of(tiny_dir):
    """`reader_of(temporal_patch_size)`, with a clip budget that leaves small frames as they are."""

    def build(temporal_patch_size=2, **budget):
        reader = VideoReader(tiny_dir, **AREA | budget)
        reader.processor.temporal_patch_size = temporal_patch_size
        reader.clip_min_pixels = 1
        return reader

    return build


@pytest.mark.parametrize("fps", RATES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_a_video_is_what_the_law_says(reader_of, tokenizer, count, size, fps):
    frame_indices = [at * 15 for at in range(count)]
    video = reader_of(size).read(clip(count), frame_indices, fps)
    (grid,) = video.video_grid_thw.tolist()
    assert grid == [temporal_patches(count, size), 2, 4]
    tokens = video_tokens(tuple(grid), timestamps(frame_indices, fps, size), 2)
    assert video.text == "".join(tokens)

    ids = torch.tensor(tokenizer("a" + video.text + "b", add_special_tokens=False)["input_ids"])
    image, begin, end = tokenizer.convert_tokens_to_ids(["<|image|>", "<|begin_of_video|>", "<|end_of_video|>"])
    types = media_types(ids, image_id=image, video_begin_id=begin, video_end_id=end)
    assert types.tolist() == video_token_types(tokenizer.convert_ids_to_tokens(ids.tolist()))
    assert video.pixel_values_videos.shape == (grid[0] * 8, 3 * size * 14 * 14)
    assert int((types == 2).sum()) == len(video.pixel_values_videos) // 4
    positions = mrope_positions(torch.zeros_like(ids)[None], types[None], {2: video.video_grid_thw}, 2)
    assert int(positions[0, 0, -1]) == int(positions.max())


@pytest.mark.parametrize("fps", RATES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_seconds_are_the_laws(count, size, fps):
    for step in (1, 7):
        frame_indices = [at * step for at in range(count)]
        assert patch_seconds(frame_indices, fps, size) == timestamps(frame_indices, fps, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_padding_is_the_laws(count, size):
    assert padded_places(count, size) == padded_frames(count, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_patches_are_those_of_transformers(reader_of, count, size):
    """Order of patches, order inside a patch and padding, of frames that need no resize."""
    reader, frames = reader_of(size), clip(count, (84, 56))
    video = reader.read(frames, range(count), 1)
    hf, frames = reader.processor, frames.transpose(0, 3, 1, 2)
    scaled = [hf.normalize(hf.rescale(frame, 1 / 255), hf.image_mean, hf.image_std) for frame in frames]
    pixels = torch.from_numpy(np.stack(scaled)).to(torch.float32)[None]
    expected, *grid = HfVideoProcessor.patchify(None, pixels, 14, 2, size)
    assert video.video_grid_thw.tolist() == [grid]
    assert video.pixel_values_videos.equal(expected[0])


def test_one_frame_twice_is_the_picture(tiny_dir, tmp_path, picture):
    name = picture("p.png", (131, 97))
    frame = Image.open(tmp_path / name)
    pixels, grid = PictureReader(tiny_dir, **AREA).read([tmp_path / name])
    for frames in ([frame, frame], [frame], np.stack([np.asarray(frame)] * 2)):
        video = VideoReader(tiny_dir, **AREA).read(frames, range(len(frames)), 2)
        assert video.pixel_values_videos.dtype == torch.float32
        assert video.pixel_values_videos.equal(pixels)
        assert video.video_grid_thw.equal(grid)
    witness = Glm4vImageProcessorPil.from_pretrained(tiny_dir)(images=[frame], return_tensors="pt")
    assert video.pixel_values_videos.equal(witness["pixel_values"])


@pytest.mark.parametrize("size", [(30, 300), (84, 56), (131, 97), (640, 360)])
@pytest.mark.parametrize("count", [2, 3, 7, 18])
def test_the_clip_budget_is_that_of_transformers(reader_of, count, size):
    reader = reader_of(max_pixels=10**6, min_pixels=1)
    reader.clip_min_pixels, reader.clip_max_pixels = 12544, 200_000
    video = reader.read([Image.new("RGB", size)] * count, range(count), 1)
    options = {"size": {"shortest_edge": 12544, "longest_edge": 200_000}}
    options |= {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    expected = HfVideoProcessor.get_num_of_video_patches(None, count, size[1], size[0], options)
    assert len(video.pixel_values_videos) == int(video.video_grid_thw.prod()) == expected


def test_a_frame_is_kept_in_its_budget(reader_of):
    video = reader_of(max_pixels=28 * 28 * 24).read([Image.new("RGB", (560, 420))] * 2, [0, 1], 1)
    assert video.video_grid_thw.tolist() == [[1, 8, 12]]


def test_transformers_refuses_a_single_frame_and_we_repeat_it(reader_of):
    options = {"size": {"shortest_edge": 1, "longest_edge": 10**6}}
    options |= {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    with pytest.raises(ValueError, match="must be larger than temporal_factor"):
        HfVideoProcessor.get_num_of_video_patches(None, 1, 28, 56, options)
    assert reader_of().read(clip(1), [0], 1).video_grid_thw.tolist() == [[1, 2, 4]]


def test_a_still_beside_a_video_is_no_video(tokenizer):
    still = "<|begin_of_image|><|image|><|end_of_image|>"
    ids = torch.tensor(tokenizer(still + video_text([0, 1], 2) + still, add_special_tokens=False)["input_ids"])
    image, begin, end = tokenizer.convert_tokens_to_ids(["<|image|>", "<|begin_of_video|>", "<|end_of_video|>"])
    types = media_types(ids, image_id=image, video_begin_id=begin, video_end_id=end)
    assert types[types > 0].tolist() == [1, 2, 2, 2, 2, 1]


GREY = [Image.new("L", (40, 30))] * 2
REFUSED = {
    "no_frames": (([], [], 1), "d: has no frames"),
    "no_frames_array": ((np.zeros((0, 28, 28, 3), np.uint8), [], 1), "d: has no frames"),
    "two_sizes": (([GREY[0], Image.new("L", (30, 40))], [0, 1], 1), "d: frame 1 is 30 x 40, frame 0 is 40 x 30"),
    "float_frames": ((np.zeros((2, 28, 28, 3)), [0, 1], 1), r"d: the frames are float64 \[2, 28, 28, 3\]"),
    "channels_first": ((np.zeros((2, 3, 28, 28), np.uint8), [0, 1], 1), r"d: the frames are uint8 \[2, 3, 28, 28\]"),
    "fps_zero": ((GREY, [0, 1], 0), "d: fps = 0 is no frame rate"),
    "fps_negative": ((GREY, [0, 1], -2.0), "d: fps = -2.0 is no frame rate"),
    "fps_nan": ((GREY, [0, 1], float("nan")), "d: fps = nan is no frame rate"),
    "too_few_indices": ((GREY, [0], 1), "d: has 2 frames and 1 frame indices"),
    "falling_indices": ((GREY, [5, 4], 1), r"d: its frame indices are negative or fall: \[5, 4\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_video_is_told(reader_of, case):
    arguments, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        reader_of().read(*arguments, name="d")


def test_a_directory_without_clip_budget_is_told(tiny_dir, tmp_path):
    (tmp_path / "preprocessor_config.json").write_bytes((tiny_dir / "preprocessor_config.json").read_bytes())
    with pytest.raises(DataError, match=r"video_preprocessor_config\.json: no clip budget"):
        VideoReader(tmp_path, **AREA)

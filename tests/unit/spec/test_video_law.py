"""The law of videos in the token stream, with transformers' own processor as witness.

Its video processor cannot be built without torchvision, but its counting and its patch order need none.
"""

import importlib
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.processing_utils import ProcessorMixin
from transformers.video_utils import VideoMetadata

from spec.rope import mrope_positions
from spec.video import padded_frames, temporal_patches, timestamps, video_token_types, video_tokens

COUNTS = [1, 2, 3, 7, 18, 65]
SIZES = [2, 4]
RATES = [1, 2, 29.97]
HfVideoProcessor = importlib.import_module("transformers.models.glm4v.video_processing_glm4v").Glm4vVideoProcessor


class TextOnly(Glm4vProcessor):
    """Glm4vProcessor whose video processor gives what it is told."""

    @classmethod
    def get_attributes(cls):
        return ["tokenizer", "video_processor"]

    def check_argument_for_proper_class(self, argument_name, argument):
        return type(argument)

    def __init__(self, tokenizer, video_processor):
        self.image_token, self.video_token = "<|image|>", "<|video|>"
        ids = tokenizer.convert_tokens_to_ids
        self.image_token_id, self.video_token_id = ids(self.image_token), ids(self.video_token)
        self.video_start_id, self.video_end_id = ids("<|begin_of_video|>"), ids("<|end_of_video|>")
        ProcessorMixin.__init__(self, tokenizer, video_processor)


class Told:
    """A video processor that looks at no pixel."""

    merge_size = 2
    model_input_names = ("video_grid_thw",)

    def __init__(self, grid, frame_indices, fps):
        self.grid, self.frame_indices, self.fps = grid, frame_indices, fps

    def __call__(self, videos, **kwargs):
        metadata = VideoMetadata(total_num_frames=10**6, fps=self.fps, frames_indices=self.frame_indices)
        return {"video_grid_thw": torch.tensor([self.grid]), "video_metadata": [metadata]}


@pytest.fixture(scope="module")
def hf(tiny_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)

    def run(grid, frame_indices, fps):
        processor = TextOnly(tokenizer, Told(grid, frame_indices, fps))
        out = processor(text=["a<|begin_of_video|><|video|><|end_of_video|>b"], videos=[torch.zeros(1, 3, 28, 28)])
        return SimpleNamespace(ids=out["input_ids"][0], types=out["mm_token_type_ids"][0], tokenizer=tokenizer)

    return run


@pytest.mark.parametrize("fps", RATES)
@pytest.mark.parametrize("count", COUNTS)
def test_transformers_writes_the_same_video(hf, count, fps):
    frame_indices = [at * 15 for at in range(count)]
    grid = (temporal_patches(count, 2), 4, 6)
    tokens = video_tokens(grid, timestamps(frame_indices, fps, 2), 2)
    found = hf(grid, frame_indices, fps)
    assert found.ids == found.tokenizer("a" + "".join(tokens) + "b", add_special_tokens=False)["input_ids"]
    by_token = [found.tokenizer.convert_ids_to_tokens(index) for index in found.ids]
    assert found.types == video_token_types(by_token)


def test_transformers_counts_every_second_frame_whatever_the_temporal_patch(hf):
    frame_indices = list(range(18))
    grid = (temporal_patches(18, 4), 2, 2)
    found = hf(grid, frame_indices, 1)
    assert "".join(video_tokens(grid, [0, 2, 4, 6, 8], 2)) in found.tokenizer.decode(found.ids)
    assert timestamps(frame_indices, 1, 4) == [0, 4, 8, 12, 16]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_transformers_pads_with_the_last_frame(count, size):
    frames = torch.arange(count)[None, :, None, None, None].expand(1, count, 3, 28, 28).contiguous()
    patches, grid_t, _, _ = HfVideoProcessor.patchify(None, frames, 14, 2, size)
    assert grid_t == temporal_patches(count, size)
    # (C, T, ph, pw): the first value of every frame in channel 0 of the first patch of each temporal patch
    places = patches[0].view(grid_t, 4, 3, size, 196)[:, 0, 0, :, 0]
    assert places.flatten().tolist() == padded_frames(count, size)


@given(count=st.integers(1, 80), size=st.integers(1, 5), fps=st.floats(0.5, 60), step=st.integers(1, 90))
@settings(max_examples=50)
def test_a_temporal_patch_is_full_and_time_never_falls(count, size, fps, step):
    places = padded_frames(count, size)
    assert len(places) == temporal_patches(count, size) * size
    assert places[:count] == list(range(count))
    assert set(places[count:]) <= {count - 1}
    assert len(places) - count < size
    seconds = timestamps([at * step for at in range(count)], fps, size)
    assert len(seconds) == temporal_patches(count, size)
    assert seconds == sorted(seconds)
    assert all(s <= at * step / fps < s + 1 for s, at in zip(seconds, places[::size]))


@pytest.mark.parametrize(
    ("frame_indices", "fps", "expected"),
    [
        ([0], 1, [0]),
        ([0, 1, 2], 1, [0, 2]),
        ([0, 30, 59, 60], 29.97, [0, 1]),
        ([0, 15, 30, 45], 29.97, [0, 1]),
        ([0, 1, 2, 3, 4], 2, [0, 1, 2]),
        ([10, 11, 12, 13], 30, [0, 0]),
    ],
)
def test_seconds_by_hand(frame_indices, fps, expected):
    assert timestamps(frame_indices, fps, 2) == expected


def test_a_video_by_hand():
    picture = ["<|begin_of_image|>", "<|image|>", "<|image|>", "<|end_of_image|>"]
    tokens = video_tokens((2, 2, 4), [0, 13], 2)
    assert tokens == ["<|begin_of_video|>", *picture, "0", *picture, "13", "<|end_of_video|>"]
    still = ["<|begin_of_image|>", "<|image|>", "<|end_of_image|>"]
    assert video_token_types([*still, *tokens, *still]) == [0, 1, 0, 0, *[0, 2, 2, 0, 0] * 2, 0, 0, 1, 0]


def test_seconds_must_fit_the_patches():
    with pytest.raises(ValueError, match="1 seconds for 2 temporal patches"):
        video_tokens((2, 2, 2), [0], 2)


@pytest.mark.parametrize("count", COUNTS)
def test_positions_take_every_temporal_patch(count):
    grid = (temporal_patches(count, 2), 4, 6)
    types = torch.tensor([video_token_types(video_tokens(grid, timestamps(range(count), 2, 2), 2))])
    t, h, w = mrope_positions(torch.zeros_like(types), types, {2: torch.tensor([grid])}, 2)[:, 0]
    # Per patch: 1 bracket, 3 by the longer side, 1 bracket, 1 second.
    starts = [2 + 6 * patch for patch in range(grid[0])]
    inside = types[0] == 2
    assert t[inside].tolist() == [start for start in starts for _ in range(6)]
    assert h[inside].tolist() == [start + row for start in starts for row in (0, 0, 0, 1, 1, 1)]
    assert w[inside].tolist() == [start + column for start in starts for column in (0, 1, 2) * 2]
    assert int(t[-1]) == 6 * grid[0] + 1

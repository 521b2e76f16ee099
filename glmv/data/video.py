"""From sampled frames to the patches that the vision tower reads, and to a video's place in the text.

Frames come decoded and sampled; which file they came from is not asked. Two resizes, as for pictures: every frame to
the config's `video_min_pixels` .. `video_max_pixels`, then all alike to whole patches within the budget of the whole
clip, frames x height x width, that the checkpoint's video_preprocessor_config.json names (`size`). Normalisation and
the order of patches are the image processor's.
"""
# Shapes: T frames, N vision patches, P = 3*2*14*14 values per patch, S tokens.

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from glmv.data.errors import DataError
from glmv.data.images import PictureReader, fit_budget, to_rgb
from glmv.data.template import IMAGE, IMAGE_BEGIN, IMAGE_END

VIDEO_BEGIN, VIDEO_END = "<|begin_of_video|>", "<|end_of_video|>"
Frames = Sequence[Image.Image] | np.ndarray
"""PIL images of one size, or uint8 [T, height, width, 3]."""


@dataclass(frozen=True)
class Video:
    """One video as patches and as text."""

    pixel_values_videos: Tensor
    """[N, P] fp32: temporal patch after temporal patch, each in merge blocks."""
    video_grid_thw: Tensor
    """[1, 3] int64: patches along time, height and width."""
    text: str
    """What stands in the text for it, from `<|begin_of_video|>` to `<|end_of_video|>`."""


class VideoReader:
    """Frames to patches and text, by the processors of a Hugging Face directory (on the CPU, without torchvision)."""

    def __init__(self, model_dir: Path, *, max_pixels: int, min_pixels: int) -> None:
        """Read the processors' configs.

        Args:
            max_pixels, min_pixels: area of one frame (`video_max_pixels`, `video_min_pixels`).
        Raises:
            DataError: the directory lacks one of the configs, or the clip's budget in it.
        """
        self.processor = PictureReader(model_dir, max_pixels=max_pixels, min_pixels=min_pixels).processor
        self.max_pixels, self.min_pixels = max_pixels, min_pixels
        self.clip_min_pixels, self.clip_max_pixels = _clip_budget(model_dir / "video_preprocessor_config.json")

    def read(self, frames: Frames, frame_indices: Sequence[int], fps: float, *, name: str = "video") -> Video:
        """Patches and text of one video.

        Args:
            frame_indices: place of every frame in the source video, never falling.
            fps: frames per second of the source video, not of the sampling.
            name: what messages call it.
        Raises:
            DataError: no frames, frames that differ in size or are no pictures, indices that do not fit, no frame rate.
        """
        images = _as_images(frames, name)
        _check_clock(len(images), frame_indices, fps, name)
        images = self._resized(images)
        temporal = self.processor.temporal_patch_size
        pixel_values_NP = self._patches([images[at] for at in padded_places(len(images), temporal)])
        side = self.processor.patch_size
        width, height = images[0].size
        grid = (-(-len(images) // temporal), height // side, width // side)
        seconds = patch_seconds(frame_indices, fps, temporal)
        text = video_text(seconds, grid[1] * grid[2] // self.processor.merge_size**2)
        return Video(pixel_values_NP, torch.tensor([grid]), text)

    def _resized(self, images: list[Image.Image]) -> list[Image.Image]:
        # Imported here: it takes seconds, and text-only data needs none of it.
        from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

        width, height = fit_budget(*images[0].size, max_pixels=self.max_pixels, min_pixels=self.min_pixels)
        images = _resize(images, (width, height))
        temporal = self.processor.temporal_patch_size
        height, width = smart_resize(
            # transformers counts frames before padding, and refuses clips shorter than one temporal patch.
            num_frames=max(len(images), temporal),
            height=height,
            width=width,
            temporal_factor=temporal,
            factor=self.processor.patch_size * self.processor.merge_size,
            min_pixels=self.clip_min_pixels,
            max_pixels=self.clip_max_pixels,
        )
        return _resize(images, (width, height))

    def _patches(self, images: list[Image.Image]) -> Tensor:
        """[N, P] of frames that fill whole temporal patches."""
        single = self.processor(images=images, do_resize=False, return_tensors="pt")["pixel_values"]
        # The processor repeats a picture over time; one of the repeats is the frame's share of its temporal patch.
        temporal, area = self.processor.temporal_patch_size, self.processor.patch_size**2
        share = single.view(len(images), -1, 3, temporal, area)[:, :, :, 0]
        share = share.unflatten(0, (-1, temporal)).permute(0, 2, 3, 1, 4)
        return share.reshape(-1, 3 * temporal * area)


def padded_places(count: int, temporal_patch_size: int) -> list[int]:
    """Frames by number, the last repeated until temporal patches are full."""
    full = math.ceil(count / temporal_patch_size) * temporal_patch_size
    return [min(place, count - 1) for place in range(full)]


def patch_seconds(frame_indices: Sequence[int], fps: float, temporal_patch_size: int) -> list[int]:
    """The whole second at which the first frame of every temporal patch is shown."""
    firsts = range(0, len(frame_indices), temporal_patch_size)
    return [int(frame_indices[first] / fps) for first in firsts]


def video_text(seconds: Sequence[int], tokens: int) -> str:
    """A video in the text: per temporal patch a picture of so many tokens, and its second without a unit."""
    patches = "".join(f"{IMAGE_BEGIN}{IMAGE * tokens}{IMAGE_END}{second}" for second in seconds)
    return f"{VIDEO_BEGIN}{patches}{VIDEO_END}"


def media_types(input_ids_S: Tensor, *, image_id: int, video_begin_id: int, video_end_id: int) -> Tensor:
    """[S] int64: 2 at image tokens inside a video's brackets, 1 at those outside, 0 at text."""
    opened_S = (input_ids_S == video_begin_id).cumsum(0) - (input_ids_S == video_end_id).cumsum(0)
    return (input_ids_S == image_id) * (1 + (opened_S > 0).long())


def _as_images(frames: Frames, name: str) -> list[Image.Image]:
    """RGB pictures of one size."""
    if len(frames) == 0:
        raise DataError(f"{name}: has no frames.\nGive at least one, or take its sample out.")
    if isinstance(frames, np.ndarray):
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
            raise DataError(
                f"{name}: the frames are {frames.dtype} {list(frames.shape)}.\n"
                "Give uint8 [frames, height, width, 3], or a list of PIL images."
            )
        return [Image.fromarray(frame) for frame in frames]
    for number, frame in enumerate(frames):
        if frame.size != frames[0].size:
            width, height = frame.size
            raise DataError(
                f"{name}: frame {number} is {width} x {height}, frame 0 is {frames[0].width} x {frames[0].height}.\n"
                "Give all frames of a video in one size."
            )
    return [to_rgb(frame) for frame in frames]


def _check_clock(count: int, frame_indices: Sequence[int], fps: float, name: str) -> None:
    if not (math.isfinite(fps) and fps > 0):
        raise DataError(f"{name}: fps = {fps} is no frame rate.\nGive the source video's frames per second, above 0.")
    if len(frame_indices) != count:
        raise DataError(
            f"{name}: has {count} frames and {len(frame_indices)} frame indices.\nGive one index for every frame."
        )
    if frame_indices[0] < 0 or any(late < early for early, late in pairwise(frame_indices)):
        raise DataError(
            f"{name}: its frame indices are negative or fall: {list(frame_indices)}.\nGive the frames in their order."
        )


def _clip_budget(path: Path) -> tuple[int, int]:
    """Least and most pixels of a whole clip."""
    try:
        size = json.loads(path.read_text())["size"]
        return int(size["shortest_edge"]), int(size["longest_edge"])
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise DataError(
            f"{path}: no clip budget (size.shortest_edge, size.longest_edge) can be read there.\n"
            "Give data.dataset_param.preprocess_parameters.model_name_or_path a complete Hugging Face directory."
        ) from fault


def _resize(images: list[Image.Image], size: tuple[int, int]) -> list[Image.Image]:
    return [image if image.size == size else image.resize(size, Image.Resampling.BICUBIC) for image in images]

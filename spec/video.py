"""A video in GLM-4.5V's token stream: frames to temporal patches, and each patch's picture tokens with its second.

Source: the published processor of GLM-4.1V and GLM-4.5V (`Glm4vProcessor`, `Glm4vVideoProcessor` of transformers 5.24);
config keys `temporal_patch_size`, `spatial_merge_size`. Where that code counts every second frame whatever the temporal
patch size, the law counts whole temporal patches; both are one for the published size, 2.
"""

from __future__ import annotations

from collections.abc import Sequence

IMAGE, BEGIN_IMAGE, END_IMAGE = "<|image|>", "<|begin_of_image|>", "<|end_of_image|>"
BEGIN_VIDEO, END_VIDEO = "<|begin_of_video|>", "<|end_of_video|>"


def temporal_patches(count: int, temporal_patch_size: int) -> int:
    """How many temporal patches so many frames make: ceil(count / temporal_patch_size)."""
    # Source: Glm4vVideoProcessor.get_num_of_video_patches, `grid_t`.
    return -(-count // temporal_patch_size)


def padded_frames(count: int, temporal_patch_size: int) -> list[int]:
    """Which frame stands at every place of the temporal patches; the last is repeated up to the next multiple."""
    # Source: Glm4vVideoProcessor.patchify, `pad = -num_frames % temporal_patch_size`.
    return [*range(count), *[count - 1] * (-count % temporal_patch_size)]


def timestamps(frame_indices: Sequence[int], fps: float, temporal_patch_size: int) -> list[int]:
    """The whole second, rounded down, at which every temporal patch begins; seconds may repeat.

    Args:
        frame_indices: place of every sampled frame in the source video.   fps: frames per second of the source video.
    """
    # Source: Glm4vProcessor.replace_video_token, `metadata.timestamps[::2]`; replace_frame_token_id, `int(...)`.
    return [int(index / fps) for index in frame_indices[::temporal_patch_size]]


def video_tokens(grid_thw: tuple[int, int, int], seconds: Sequence[int], merge: int) -> list[str]:
    """A video in the text, each control token and each second one string.

    Per temporal patch: a bracketed picture of h * w / merge^2 tokens, then its second as a plain number.

    Args:
        grid_thw: patches before merging.   seconds: one of each temporal patch.   merge: side of a merge block.

    Raises:
        ValueError: seconds and temporal patches differ in number.
    """
    # Source: Glm4vProcessor.replace_video_token, between the brackets that the chat template writes.
    patches, height, width = grid_thw
    if len(seconds) != patches:
        raise ValueError(f"{len(seconds)} seconds for {patches} temporal patches")
    picture = [IMAGE] * (height * width // merge**2)
    inside = [token for second in seconds for token in (BEGIN_IMAGE, *picture, END_IMAGE, str(second))]
    return [BEGIN_VIDEO, *inside, END_VIDEO]


def video_token_types(tokens: Sequence[str]) -> list[int]:
    """Type of every token of a text: 2 at image tokens inside a video's brackets, 1 at those outside, else 0."""
    # Source: Glm4vProcessor.create_mm_token_type_ids.
    types, opened = [], 0
    for token in tokens:
        opened += (token == BEGIN_VIDEO) - (token == END_VIDEO)
        types.append((2 if opened > 0 else 1) if token == IMAGE else 0)
    return types

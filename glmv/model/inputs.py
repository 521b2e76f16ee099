"""What a batch must agree on before the model runs: pixels, grids, token types, documents."""
# Shapes: B batch, S sequence, N patches, P pixels of a patch.

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from glmv.model.positions import IMAGE, KINDS, TEXT, VIDEO, InputError


@dataclass(frozen=True)
class OnHost:
    """A tensor among the model's inputs that stays in the host's memory.

    The host needs token types, masks, grids and borders to lay out the pass, and would have to wait for an accelerator
    to give them back. FSDP2 sends every bare tensor among the inputs to its device.
    """

    tensor: Tensor


def on_host(given: Tensor | OnHost | None) -> Tensor | None:
    """The tensor in the host's memory; for a bare one on an accelerator the host waits."""
    if given is None:
        return None
    return given.tensor if isinstance(given, OnHost) else given.cpu()


@dataclass(frozen=True)
class Media:
    """All images of a batch, or all videos: patches [N, P], and [n, 3] patches along time, height and width.

    The patches are on the model's device, the grids on the host.
    """

    pixel_values_NP: Tensor
    grid_thw: Tensor


def gather_media(
    pixel_values_NP: Tensor | None,
    image_grid_thw: Tensor | None,
    pixel_values_videos_NP: Tensor | None,
    video_grid_thw: Tensor | None,
) -> dict[int, Media]:
    """By token type, what the batch has.

    Raises:
        InputError: pixels without grids, or grids without pixels.
    """
    given = {IMAGE: (pixel_values_NP, image_grid_thw), VIDEO: (pixel_values_videos_NP, video_grid_thw)}
    media = {}
    for kind, (pixels_NP, grid_thw) in given.items():
        if (pixels_NP is None) != (grid_thw is None):
            names = {IMAGE: "pixel_values and image_grid_thw", VIDEO: "pixel_values_videos and video_grid_thw"}
            raise InputError(f"{names[kind]} come together: a batch has both, or neither.")
        if pixels_NP is not None and grid_thw is not None:
            media[kind] = Media(pixels_NP, grid_thw)
    return media


def check_media(types_BS: Tensor, media: Mapping[int, Media], merge: int) -> None:
    """Refuse a batch whose tokens, features and pixels of a kind differ in number."""
    counted = types_BS.flatten().bincount(minlength=3).tolist()
    if len(counted) > 3:
        raise InputError(
            f"mm_token_type_ids has a {len(counted) - 1}. It must be {TEXT} at text, {IMAGE} where an image's features "
            f"go and {VIDEO} where a video's do."
        )
    for kind, name in KINDS.items():
        own = media.get(kind)
        patches = 0 if own is None else _count_patches(own, name, merge)
        if counted[kind] != patches // merge**2:
            raise InputError(
                f"{name} tokens and {name} features do not match: mm_token_type_ids marks {counted[kind]} tokens with "
                f"{kind}, {name}_grid_thw describes {patches // merge**2} features.\n"
                f"Give mm_token_type_ids with every {name}, and one token per feature; a cutoff inside one breaks this."
            )


def _count_patches(media: Media, name: str, merge: int) -> int:
    grids = media.grid_thw.tolist()
    for t, h, w in grids:
        if min(t, h, w) < 1 or h % merge or w % merge:
            raise InputError(
                f"{name}_grid_thw has a row [{t}, {h}, {w}]: rows and columns must be multiples of "
                f"spatial_merge_size {merge}, and none may be 0."
            )
    patches = sum(t * h * w for t, h, w in grids)
    if len(media.pixel_values_NP) != patches:
        pixels = {"image": "pixel_values", "video": "pixel_values_videos"}[name]
        raise InputError(f"{pixels} has {len(media.pixel_values_NP)} patches, {name}_grid_thw describes {patches}.")
    return patches


def check_documents(cu_seqlens: Tensor, shape: torch.Size, attention_mask_BS: Tensor | None) -> list[int]:
    """Lengths of the packed documents of a batch whose token ids have this shape, [B, S].

    Raises:
        InputError: there is more than one row, the borders do not rise from 0 to at most S, or the mask says otherwise.
    """
    rows, length = shape
    borders = cu_seqlens.tolist()
    if rows != 1:
        raise InputError(f"cu_seqlens is for one row of packed documents, and the batch has {rows}.\nPack them in one.")
    lengths = [end - begin for begin, end in pairwise(borders)]
    if not lengths or borders[0] != 0 or min(lengths) < 1 or borders[-1] > length:
        raise InputError(
            f"cu_seqlens = {borders} must rise from 0 to at most the {length} tokens of the row.\n"
            "Give the end of every document, an empty one left out."
        )
    place_S = torch.arange(length)
    if attention_mask_BS is not None and not (attention_mask_BS[0] != 0).equal(place_S < borders[-1]):
        raise InputError(
            f"attention_mask and cu_seqlens disagree: the documents end at {borders[-1]}, so the mask must be 1 up to "
            "there and 0 behind.\nCorrect it, or leave it out."
        )
    return lengths

"""M-RoPE positions: (t, h, w) of every token, from token types and image grids.

Text advances all three components together. An image of h x w merged patches shares one t, spreads h and w over its
rows and columns, and advances the running position by max(h, w). A video is one such image per temporal patch.
"""
# Shapes: B batch, S sequence, L real tokens of one sample.

from collections.abc import Iterator

import torch
from torch import Tensor

from glmv.errors import GlmvError

TEXT = 0


class InputError(GlmvError):
    """Tokens, token types, pixels and image grids of a batch do not fit together."""


def frame_grids(image_grid_thw: Tensor | None, merge: int) -> list[tuple[int, int]]:
    """Merged (rows, columns) of every temporal patch, in order: one of an image, t of a video."""
    if image_grid_thw is None:
        return []
    return [(h // merge, w // merge) for t, h, w in image_grid_thw.tolist() for _ in range(t)]


def mrope_positions(
    mm_token_type_ids_BS: Tensor, image_grid_thw: Tensor | None, merge: int, attention_mask_BS: Tensor | None = None
) -> Tensor:
    """Positions [3, B, S] int64 on the device of the token types; 0 where the sample is padded.

    Args:
        mm_token_type_ids_BS: 0 for text, 1 for an image's tokens, 2 for a video's.
        image_grid_thw: int64 [images, 3], patches before merging, in token order over the whole batch.
        merge: spatial merge size.
        attention_mask_BS: 0 for padding (left or right); positions of a sample start at its first real token.
    Raises:
        InputError: a run of image tokens is not filled exactly by the next grids.
    """
    grids = iter(frame_grids(image_grid_thw, merge))
    types_BS = mm_token_type_ids_BS.cpu()
    real_BS = (torch.ones_like(types_BS) if attention_mask_BS is None else attention_mask_BS.cpu()).bool()
    positions_3BS = torch.zeros(3, *types_BS.shape, dtype=torch.int64)
    for row, (types_S, real_S) in enumerate(zip(types_BS, real_BS, strict=True)):
        positions_3BS[:, row, real_S] = sample_positions(types_S[real_S], grids, row)
    return positions_3BS.to(mm_token_type_ids_BS.device)


def sample_positions(types_L: Tensor, grids: Iterator[tuple[int, int]], row: int) -> Tensor:
    """Positions [3, L] of one unpadded sample; takes its images from `grids`."""
    pieces = [torch.zeros(3, 0, dtype=torch.int64)]
    current = 0
    values, counts = torch.unique_consecutive(types_L, return_counts=True)
    for kind, length in zip(values.tolist(), counts.tolist(), strict=True):
        if kind == TEXT:
            pieces.append((torch.arange(length) + current).expand(3, -1))
            current += length
            continue
        while length > 0:  # images may stand next to each other
            rows, columns = next(grids, (0, 0))
            if not 0 < rows * columns <= length:
                raise InputError(
                    f"sample {row} of the batch: a run of image tokens has {length} left where the next image in "
                    f"image_grid_thw has {rows * columns} features ({rows} x {columns} after merging).\n"
                    "Each image needs one token per feature; check the processor's settings and the cutoff."
                )
            pieces.append(image_positions(rows, columns, current))
            current += max(rows, columns)
            length -= rows * columns
    return torch.cat(pieces, dim=1)


def image_positions(rows: int, columns: int, start: int) -> Tensor:
    """Positions [3, rows * columns] of one image whose first token comes at `start`."""
    h, w = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([torch.zeros_like(h), h, w]).flatten(1) + start

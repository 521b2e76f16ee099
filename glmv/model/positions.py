"""M-RoPE positions: (t, h, w) of every token, from documents, token types and grids.

Text advances all three components together. A picture of h x w merged patches (an image, or one temporal patch of a
video) shares one t, spreads h and w over its rows and columns, and advances the running position by max(h, w). Every
document starts at 0.
"""
# Shapes: B batch, S sequence, L tokens of one document.

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from glmv.errors import GlmvError

TEXT, IMAGE, VIDEO = 0, 1, 2
KINDS = {IMAGE: "image", VIDEO: "video"}


class InputError(GlmvError):
    """Tokens, token types, pixels, grids and documents of a batch do not fit together."""


def picture_sizes(grid_thw: Tensor, merge: int) -> list[tuple[int, int]]:
    """Merged (rows, columns) of every temporal patch, in order: one of an image, t of a video."""
    return [(h // merge, w // merge) for t, h, w in grid_thw.tolist() for _ in range(t)]


def mrope_positions(types_BS: Tensor, grids: Mapping[int, Tensor], merge: int, document_BS: Tensor) -> Tensor:
    """Positions [3, B, S] int64; 0 at padding. All tensors are on the host.

    Args:
        types_BS: 0 for text, 1 for an image's tokens, 2 for a video's.
        grids: by token type, int64 [n, 3], patches before merging, in token order over the whole batch.
        merge: spatial merge size.
        document_BS: from `glmv.ops.documents.document_ids`.
    Raises:
        InputError: a run of image or video tokens is not filled exactly by the next grids.
    """
    pictures = {kind: iter(picture_sizes(grid, merge)) for kind, grid in grids.items()}
    positions_3BS = torch.zeros(3, *types_BS.shape, dtype=torch.int64)
    for row, (types_S, document_S) in enumerate(zip(types_BS, document_BS, strict=True)):
        for document in document_S[document_S >= 0].unique().tolist():
            own_S = document_S == document
            where = f"sample {row} of the batch" if document == 0 else f"document {document} of the packed row"
            positions_3BS[:, row, own_S] = document_positions(types_S[own_S], pictures, where)
    return positions_3BS


def document_positions(types_L: Tensor, pictures: Mapping[int, Iterator[tuple[int, int]]], where: str) -> Tensor:
    """Positions [3, L] of one document without padding; takes its pictures' sizes from the iterators."""
    pieces = [torch.zeros(3, 0, dtype=torch.int64)]
    current = 0
    values, counts = torch.unique_consecutive(types_L, return_counts=True)
    for kind, length in zip(values.tolist(), counts.tolist(), strict=True):
        if kind == TEXT:
            pieces.append((torch.arange(length) + current).expand(3, -1))
            current += length
            continue
        while length > 0:  # pictures may stand next to each other
            rows, columns = next(pictures.get(kind, iter(())), (0, 0))
            if not 0 < rows * columns <= length:
                raise InputError(
                    f"{where}: a run of {KINDS[kind]} tokens has {length} left where the next {KINDS[kind]} in "
                    f"{KINDS[kind]}_grid_thw has {rows * columns} features ({rows} x {columns} after merging).\n"
                    "Each picture needs one token per feature; check the processor's settings and the cutoff."
                )
            pieces.append(picture_positions(rows, columns, current))
            current += max(rows, columns)
            length -= rows * columns
    return torch.cat(pieces, dim=1)


def picture_positions(rows: int, columns: int, start: int) -> Tensor:
    """Positions [3, rows * columns] of one picture whose first token comes at `start`."""
    h, w = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([torch.zeros_like(h), h, w]).flatten(1) + start

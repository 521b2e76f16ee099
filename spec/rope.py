"""Rotary position embedding: M-RoPE of the text decoder, axial rope of the vision tower, and their positions.

Source: RoFormer (arXiv 2104.09864), M-RoPE of Qwen2-VL (arXiv 2409.12191); config keys `rope_theta`,
`partial_rotary_factor`, `mrope_section`.
"""

# Shapes: B batch, S sequence, D rotary dims, R = D/2 frequencies, N vision patches.

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from spec.config import TextConfig, VisionConfig
from spec.numerics import Policy


def frequencies(dim: int, theta: float, policy: Policy) -> Tensor:
    """theta^(-2i/dim) for i in 0 .. dim/2 - 1, rounded to the policy's dtype of buffers."""
    frequency = theta ** -(torch.arange(0, dim, 2, dtype=policy.wide) / dim)
    return frequency if policy.buffers is None else policy.widen(frequency.to(policy.buffers))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn dimension i against dimension i + D/2 (half-split pairs); dimensions past D pass through."""
    dim = cos.shape[-1]
    turned, passed = x[..., :dim], x[..., dim:]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, passed], -1)


def text_cos_sin(position_3BS: Tensor, config: TextConfig, policy: Policy) -> tuple[Tensor, Tensor]:
    """cos and sin [B, S, D] in the compute dtype; frequency chunk k turns by axis k of (t, h, w)."""
    angle_3BSR = policy.widen(position_3BS)[..., None] * frequencies(config.rotary_dim, config.rope_theta, policy)
    chunks = angle_3BSR.split(list(config.mrope_section), dim=-1)
    angle_BSR = torch.cat([chunk[axis % 3] for axis, chunk in enumerate(chunks)], -1)
    angle_BSD = torch.cat([angle_BSR, angle_BSR], -1)
    return policy.round(angle_BSD.cos()), policy.round(angle_BSD.sin())


def vision_cos_sin(row_N: Tensor, column_N: Tensor, config: VisionConfig, policy: Policy) -> tuple[Tensor, Tensor]:
    """cos and sin [N, head_dim] in the wide dtype: half of the frequencies turn by row, half by column."""
    frequency = frequencies(config.head_dim // 2, config.rope_theta, policy)
    angle = torch.cat([policy.widen(row_N)[:, None] * frequency, policy.widen(column_N)[:, None] * frequency], -1)
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def mrope_positions(document_BS: Tensor, token_type_BS: Tensor, grids: dict[int, Tensor], merge: int) -> Tensor:
    """Positions (t, h, w) of every token, [3, B, S] int64.

    Text advances all three together. A picture (an image, or one temporal patch of a video) stands still in t and
    spreads its merged grid over h and w; what follows starts behind its longer side. Every document begins at 0.
    Padding has position 0 and takes none.

    Args:
        document_BS: number of the document that each token belongs to, -1 at padding.
        token_type_BS: 0 text, 1 image, 2 video.
        grids: by token type, [n, 3] in patches before merging, of the whole batch in token order.
        merge: side of a merge block in patches.
    """
    position_3BS = torch.zeros(3, *document_BS.shape, dtype=torch.int64)
    pictures = {kind: iter(picture_sizes(grid, merge)) for kind, grid in grids.items()}
    for sample, (document_S, token_type_S) in enumerate(zip(document_BS, token_type_BS, strict=True)):
        for document in document_S[document_S >= 0].unique().tolist():
            places = (document_S == document).nonzero().flatten().tolist()
            position_3BS[:, sample, places] = document_positions(token_type_S[places].tolist(), pictures)
    return position_3BS


def picture_sizes(grid_thw: Tensor, merge: int) -> list[tuple[int, int]]:
    """Merged (rows, columns) of every image and of every temporal patch of a video, in token order."""
    return [(h // merge, w // merge) for t, h, w in grid_thw.tolist() for _ in range(t)]


def document_positions(types: list[int], pictures: dict[int, Iterator[tuple[int, int]]]) -> Tensor:
    """Positions [3, S] of one document's tokens, which takes its pictures from the iterators."""
    positions: list[tuple[int, int, int]] = []
    current = 0
    while len(positions) < len(types):
        kind = types[len(positions)]
        if kind == 0:
            positions.append((current, current, current))
            current += 1
        else:
            rows, columns = next(pictures[kind])
            positions += [
                (current, current + row, current + column) for row in range(rows) for column in range(columns)
            ]
            current += max(rows, columns)
    return torch.tensor(positions).T

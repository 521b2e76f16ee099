"""Rotary position embedding: M-RoPE of the text decoder, axial rope of the vision tower, and their positions.

Source: RoFormer (arXiv 2104.09864), M-RoPE of Qwen2-VL (arXiv 2409.12191); config keys `rope_theta`,
`partial_rotary_factor`, `mrope_section`.
"""

# Shapes: B batch, S sequence, D rotary dims, R = D/2 frequencies, N vision patches.

from __future__ import annotations

import torch
from torch import Tensor

from spec.config import TextConfig, VisionConfig
from spec.numerics import Policy


def frequencies(dim: int, theta: float, policy: Policy) -> Tensor:
    """theta^(-2i/dim) for i in 0 .. dim/2 - 1."""
    return theta ** -(torch.arange(0, dim, 2, dtype=policy.wide) / dim)


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


def mrope_positions(
    real_BS: Tensor, token_type_BS: Tensor, image_grid_thw: Tensor | None, spatial_merge_size: int
) -> Tensor:
    """Positions (t, h, w) of every token, [3, B, S] int64.

    Text advances all three together. An image stands still in t and spreads its merged grid over h and w; what follows
    starts behind its longer side. Padding has position 0 and takes none.

    Args:
        real_BS: bool, False at padding.   token_type_BS: 0 text, 1 image.
        image_grid_thw: [n, 3], the images of the whole batch in order, in patches before merging.
    """
    position_3BS = torch.zeros(3, *real_BS.shape, dtype=torch.int64)
    grids = iter([] if image_grid_thw is None else image_grid_thw.tolist())
    for sample, (real_S, token_type_S) in enumerate(zip(real_BS, token_type_BS, strict=True)):
        place_S = real_S.nonzero().flatten().tolist()
        current = done = 0
        while done < len(place_S):
            if token_type_S[place_S[done]] == 0:
                position_3BS[:, sample, place_S[done]] = current
                current, done = current + 1, done + 1
                continue
            _, rows, columns = next(grids)
            rows, columns = rows // spatial_merge_size, columns // spatial_merge_size
            for row in range(rows):
                for column in range(columns):
                    place = place_S[done + row * columns + column]
                    position_3BS[:, sample, place] = torch.tensor([current, current + row, current + column])
            current, done = current + max(rows, columns), done + rows * columns
    return position_3BS

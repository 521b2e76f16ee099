"""The vision tower's learned position table, resampled to any grid.

Bicubic interpolation (Keys, a = -0.75), half-pixel centres, taps clamped at the border, all in fp32: 16 table
rows per patch, gathered and weighted. Equal to `grid_sample(mode="bicubic", padding_mode="border",
align_corners=False)`, whose backward is not deterministic on CUDA.
"""
# Shapes: N patches, H hidden, Q table rows (side * side).

import torch
from torch import Tensor

from glmv.ops.precision import at_least_fp32

KEYS_A = -0.75


def keys_weights(fraction_N: Tensor) -> list[Tensor]:
    """Weights [N] of the taps at -1, 0, 1 and 2 for a sample `fraction` past tap 0."""
    a = KEYS_A

    def near(x: Tensor) -> Tensor:  # |x| <= 1
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:  # 1 < |x| < 2
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    f = fraction_N
    return [far(f + 1), near(f), near(1 - f), far(2 - f)]


def taps(coordinate_N: Tensor, size_N: Tensor, side: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Four (index, weight) pairs along one axis for patches at `coordinate` of a grid `size` long."""
    at_N = (coordinate_N.to(dtype) + 0.5) / size_N.to(dtype) * side - 0.5
    base_N = at_N.floor()
    weights = keys_weights(at_N - base_N)
    return [
        ((base_N.long() + offset).clamp(0, side - 1), weight)
        for offset, weight in zip((-1, 0, 1, 2), weights, strict=True)
    ]


def interpolate(table_QH: Tensor, coordinate_N2: Tensor, size_N2: Tensor) -> Tensor:
    """Position embedding [N, H] of every patch, in the table's dtype.

    Args:
        table_QH: learned embeddings of a square grid, row-major.
        coordinate_N2: (row, column) of each patch.   size_N2: (rows, columns) of the patch's image.
    """
    dtype = at_least_fp32(table_QH.dtype)
    side = round(table_QH.shape[0] ** 0.5)
    wide_QH = table_QH.to(dtype)
    total_NH = torch.zeros(coordinate_N2.shape[0], table_QH.shape[1], dtype=dtype, device=table_QH.device)
    for row_N, row_weight_N in taps(coordinate_N2[:, 0], size_N2[:, 0], side, dtype):
        for column_N, column_weight_N in taps(coordinate_N2[:, 1], size_N2[:, 1], side, dtype):
            total_NH = total_NH + wide_QH[row_N * side + column_N] * (row_weight_N * column_weight_N)[:, None]
    return total_NH.to(table_QH.dtype)

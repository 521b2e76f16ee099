"""Rotary angles of the text decoder (M-RoPE, chunked sections) and of the vision tower (axial, height and width)."""
# Shapes: B batch, S sequence, N patches, R rotary dim, f = R/2 frequencies.

from collections.abc import Callable

import torch
from torch import Tensor, nn

from glmv.model.config import TextConfig, VisionConfig
from glmv.model.layers import KeepsFloat32
from glmv.ops.precision import at_least_fp32
from glmv.ops.rope import inverse_frequencies


class Rotary(KeepsFloat32):
    """Holds `inv_freq`, a non-persistent fp32 buffer that no checkpoint restores: `reset` computes it.

    After meta initialisation and `to_empty` it is garbage until `Glm4vMoeForConditionalGeneration.reset_buffers`.
    A float64 model has float64 frequencies, not widened fp32 ones.
    """

    inv_freq: Tensor
    rounded_to: torch.dtype | None = None

    def __init__(self, theta: float, dim: int) -> None:
        super().__init__()
        self.theta, self.dim = theta, dim
        dtype = at_least_fp32(torch.get_default_dtype())
        self.register_buffer("inv_freq", torch.empty(dim // 2, dtype=dtype), persistent=False)
        self.reset()

    def reset(self) -> None:
        """Write the frequencies, in place, on whatever device the buffer is; rounded if `rounded_to` names a dtype."""
        exact = inverse_frequencies(self.theta, self.dim, self.inv_freq.dtype)
        self.inv_freq.copy_(exact if self.rounded_to is None else exact.to(self.rounded_to))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        before = self.inv_freq.dtype
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != before:
            self.reset()
        return self


class TextRotary(Rotary):
    """M-RoPE: the frequencies are cut into consecutive sections; section k reads position component k % 3 (t, h, w)."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__(config.rope_theta, config.rotary_dim)
        self.mrope_section = config.mrope_section

    def forward(self, position_ids_3BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, 1, S, R], computed in fp32 and rounded to the compute dtype (as the model was trained).

        Args:
            position_ids_3BS: int64 (t, h, w) position of every token.
            dtype: the compute dtype.
        """
        # Slices, not an index list, which would first have to travel to the device.
        sections = [position_ids_3BS[k % 3, ..., None].expand(-1, -1, n) for k, n in enumerate(self.mrope_section)]
        angle_BSf = torch.cat(sections, dim=-1).to(at_least_fp32(dtype)) * self.inv_freq
        angle_B1SR = torch.cat([angle_BSf, angle_BSf], dim=-1)[:, None]
        return angle_B1SR.cos().to(dtype), angle_B1SR.sin().to(dtype)


class VisionRotary(Rotary):
    """Axial RoPE: a quarter of the head's channels turn with the patch's row, a quarter with its column, twice."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config.rope_theta, config.head_dim // 2)

    def forward(self, coordinate_N2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [N, 1, D] of the (row, column) coordinates; fp32 whatever the compute dtype."""
        position_N2 = coordinate_N2.to(at_least_fp32(dtype))
        angle_Nf = (position_N2[:, :, None] * self.inv_freq).flatten(1)
        angle_N1D = torch.cat([angle_Nf, angle_Nf], dim=-1)[:, None]
        return angle_N1D.cos(), angle_N1D.sin()


def reset_rotaries(model: nn.Module, rounded_to: torch.dtype | None) -> None:
    """Recompute the frequencies of every rotary module inside `model`."""
    for module in model.modules():
        if isinstance(module, Rotary):
            module.rounded_to = rounded_to
            module.reset()

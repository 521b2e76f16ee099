"""From samples to one batch of tensors."""
# Shapes: B batch, S sequence, N vision patches, P = 3*2*14*14 values per patch, n pictures.

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from glmv.data.sample import IGNORED, Sample


@dataclass(frozen=True)
class Batch:
    """A micro-batch. Short samples are filled up on the right."""

    input_ids: Tensor
    """[B, S] int64."""
    attention_mask: Tensor
    """[B, S] int64: 1 at tokens, 0 at filling."""
    labels: Tensor
    """[B, S] int64, not shifted; -100 where nothing is learned, filling included."""
    mm_token_type_ids: Tensor
    """[B, S] int64: 1 where a picture's features go."""
    pixel_values: Tensor | None
    """[N, P] fp32 of all pictures in token order; None if no sample has one."""
    image_grid_thw: Tensor | None
    """[n, 3] int64; None if no sample has a picture."""
    sample_ids: tuple[str, ...]
    """Names of the samples, for messages."""

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device; what is page-locked travels while the host goes on."""

        def move(value: Tensor) -> Tensor:
            return value.to(device, non_blocking=True)

        return replace(
            self,
            input_ids=move(self.input_ids),
            attention_mask=move(self.attention_mask),
            labels=move(self.labels),
            mm_token_type_ids=move(self.mm_token_type_ids),
            pixel_values=None if self.pixel_values is None else move(self.pixel_values),
            image_grid_thw=None if self.image_grid_thw is None else move(self.image_grid_thw),
        )

    def model_inputs(self) -> dict[str, Tensor | None]:
        """What the model's forward takes, by its names."""
        return {
            "input_ids_BS": self.input_ids,
            "attention_mask_BS": self.attention_mask,
            "mm_token_type_ids_BS": self.mm_token_type_ids,
            "pixel_values_NP": self.pixel_values,
            "image_grid_thw": self.image_grid_thw,
        }


def collate(samples: Sequence[Sample], pad_token_id: int) -> Batch:
    """Put samples together, in their order."""
    return Batch(
        input_ids=_fill([sample.input_ids for sample in samples], pad_token_id),
        attention_mask=_fill([torch.ones_like(sample.input_ids) for sample in samples], 0),
        labels=_fill([sample.labels for sample in samples], IGNORED),
        mm_token_type_ids=_fill([sample.mm_token_type_ids for sample in samples], 0),
        pixel_values=_join([sample.pixel_values for sample in samples]),
        image_grid_thw=_join([sample.image_grid_thw for sample in samples]),
        sample_ids=tuple(sample.sample_id for sample in samples),
    )


def _fill(rows: list[Tensor], value: int) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=value)


def _join(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None

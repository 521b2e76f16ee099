"""From samples to one batch of tensors."""
# Shapes: B batch, S sequence, N vision patches, P = 3*2*14*14 values per patch, n pictures or videos.

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from glmv.data.errors import DataError
from glmv.data.sample import IGNORED, Sample
from glmv.model.inputs import OnHost
from glmv.ops.documents import document_ids
from glmv.ops.loss import unpredictable_ignored


@dataclass(frozen=True)
class Batch:
    """A micro-batch: a row a sample, short ones filled up on the right; or one row of samples packed end to end."""

    input_ids: Tensor
    """[B, S] int64."""
    attention_mask: Tensor
    """[B, S] int64: 1 at tokens, 0 at filling."""
    labels: Tensor
    """[B, S] int64, not shifted; -100 where nothing is learned, filling and first tokens included."""
    mm_token_type_ids: Tensor
    """[B, S] int64: 1 where a picture's features go, 2 where a video's do."""
    pixel_values: Tensor | None
    """[N, P] fp32 of all pictures in token order; None if no sample has one."""
    image_grid_thw: Tensor | None
    """[n, 3] int64; None if no sample has a picture."""
    sample_ids: tuple[str, ...]
    """Names of the samples, for messages."""
    pixel_values_videos: Tensor | None = None
    """[N, P] fp32 of all videos in token order; None if no sample has one."""
    video_grid_thw: Tensor | None = None
    """[n, 3] int64; None if no sample has a video."""
    cu_seqlens: Tensor | None = None
    """[samples + 1] int32, where the samples of a packed row begin and end; None if a row is one sample."""

    @property
    def document_ids(self) -> Tensor:
        """[B, S] int64: which of its row's samples a token belongs to, -1 at filling."""
        return document_ids(self.attention_mask, self.cu_seqlens)

    def to(self, device: torch.device) -> "Batch":
        """Token ids, labels and pixels on a device; what is page-locked travels while the host goes on.

        All else tells the host how to lay out the pass, and stays.
        """
        names = "input_ids", "labels", "pixel_values", "pixel_values_videos"
        tensors = {name: value for name in names if (value := getattr(self, name)) is not None}
        moved: dict[str, Any] = {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
        return replace(self, **moved)

    def model_inputs(self) -> dict[str, Tensor | OnHost | None]:
        """What the model's forward takes, by its names."""
        host = {
            "attention_mask_BS": self.attention_mask,
            "mm_token_type_ids_BS": self.mm_token_type_ids,
            "image_grid_thw": self.image_grid_thw,
            "video_grid_thw": self.video_grid_thw,
            "cu_seqlens": self.cu_seqlens,
        }
        return {
            "input_ids_BS": self.input_ids,
            "pixel_values_NP": self.pixel_values,
            "pixel_values_videos_NP": self.pixel_values_videos,
            **{name: None if value is None else OnHost(value) for name, value in host.items()},
        }


def collate(samples: Sequence[Sample], pad_token_id: int) -> Batch:
    """Put samples below each other, in their order."""
    mask_BS = _fill([torch.ones_like(sample.input_ids) for sample in samples], 0)
    labels_BS = _fill([sample.labels for sample in samples], IGNORED)
    return Batch(
        input_ids=_fill([sample.input_ids for sample in samples], pad_token_id),
        attention_mask=mask_BS,
        labels=unpredictable_ignored(labels_BS, document_ids(mask_BS)),
        mm_token_type_ids=_fill([sample.mm_token_type_ids for sample in samples], 0),
        sample_ids=tuple(sample.sample_id for sample in samples),
        **_media(samples),
    )


def pack(samples: Sequence[Sample], pad_token_id: int, *, length: int | None = None) -> Batch:
    """Put samples behind each other in one row, in their order; none sees another, nor predicts its first token.

    Args:
        length: fill the row up to so many tokens.
    Raises:
        DataError: the samples are longer than `length` together.
    """
    ends = torch.tensor([len(sample.input_ids) for sample in samples]).cumsum(0)
    total = int(ends[-1])
    length = total if length is None else length
    if total > length:
        names = ", ".join(sample.sample_id for sample in samples)
        raise DataError(f"{names}: {total} tokens do not fit into a row of {length}.\nPack fewer, or a longer row.")
    mask_1S = (torch.arange(length) < total).long()[None]
    cu_seqlens = F.pad(ends, (1, 0)).to(torch.int32)

    def row(parts: list[Tensor], value: int) -> Tensor:
        return F.pad(torch.cat(parts), (0, length - total), value=value)[None]

    labels_1S = row([sample.labels for sample in samples], IGNORED)
    return Batch(
        input_ids=row([sample.input_ids for sample in samples], pad_token_id),
        attention_mask=mask_1S,
        labels=unpredictable_ignored(labels_1S, document_ids(mask_1S, cu_seqlens)),
        mm_token_type_ids=row([sample.mm_token_type_ids for sample in samples], 0),
        sample_ids=tuple(sample.sample_id for sample in samples),
        cu_seqlens=cu_seqlens,
        **_media(samples),
    )


def _media(samples: Sequence[Sample]) -> dict[str, Any]:
    names = "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"
    return {name: _join([getattr(sample, name) for sample in samples]) for name in names}


def _fill(rows: list[Tensor], value: int) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=value)


def _join(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None

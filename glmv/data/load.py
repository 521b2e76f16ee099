"""`load_samples`: every sample of the data set, ready in memory before the first step."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import torch.distributed as dist
from rich.progress import track

from glmv.config.data import DataConfig
from glmv.data.build import build_sample
from glmv.data.dataset import Conversation, read_conversations
from glmv.data.errors import DataError
from glmv.data.images import PictureReader
from glmv.data.sample import Dropped, Sample
from glmv.data.template import ChatTemplate

_log = logging.getLogger(__name__)
_NAMED = 10  # dropped samples that a warning names; the rest is counted


class Samples(Sequence[Sample]):
    """The samples in file order; those that were dropped, with their reasons; and the id that fills up a batch."""

    def __init__(self, samples: Sequence[Sample], dropped: Sequence[Dropped], pad_token_id: int) -> None:
        self._samples = tuple(samples)
        self.dropped = tuple(dropped)
        self.pad_token_id = pad_token_id

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        """One sample, or a slice of them."""
        return self._samples[index]


def load_samples(data: DataConfig, model_dir: Path) -> Samples:
    """Read, encode and check the whole data set. Every rank does this for itself and gets the same.

    Args:
        data: the config's `data` section.
        model_dir: Hugging Face directory with tokenizer, chat template and image processor.
    Raises:
        DataError: with file and sample, for anything that cannot be trained on; also when every sample is dropped.
    """
    param = data.dataset_param
    conversations = read_conversations(param)
    template = ChatTemplate(model_dir)
    pixels = param.preprocess_parameters
    pictures = (
        PictureReader(model_dir, max_pixels=pixels.image_max_pixels, min_pixels=pixels.image_min_pixels)
        if any(isinstance(each, Conversation) and each.images for each in conversations)
        else None
    )
    basic = param.basic_parameters
    progress = track(conversations, "Reading samples", transient=True, disable=_rank() != 0)
    built = [each if isinstance(each, Dropped) else build_sample(each, template, pictures, basic) for each in progress]
    samples = [each for each in built if isinstance(each, Sample)]
    dropped = [each for each in built if isinstance(each, Dropped)]
    if dropped:
        message = f"{basic.dataset}: {len(dropped)} of {len(built)} samples are dropped:\n{_list(dropped)}"
        if not samples:
            raise DataError(
                f"{message}\nNone is left to train on. Write answers where there are none; where samples are cut, "
                "raise cutoff_len or lower image_max_pixels."
            )
        if _rank() == 0:
            _log.warning(message)
    return Samples(samples, dropped, template.pad_token_id)


def _list(dropped: Sequence[Dropped]) -> str:
    lines = [f"  {each.sample_id}: {each.reason}" for each in dropped[:_NAMED]]
    more = len(dropped) - _NAMED
    return "\n".join([*lines, f"  and {more} more"] if more > 0 else lines)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0

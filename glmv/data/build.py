"""From one conversation to one sample: pictures, tokens, labels, and the cut.

A sample that is longer than `cutoff_len` loses its end. Pictures that lie wholly behind the cut go with it, pixels
included; a sample whose cut would fall inside a picture is dropped, and so is one that has nothing left to learn.
"""
# Shapes: S tokens, N vision patches, n pictures.

import torch
from torch import Tensor

from glmv.config.data import BasicParameters
from glmv.data.dataset import Conversation
from glmv.data.errors import DataError
from glmv.data.images import PictureReader
from glmv.data.sample import IGNORED, Dropped, Sample
from glmv.data.template import ChatTemplate, Encoded


def build_sample(
    conversation: Conversation, template: ChatTemplate, pictures: PictureReader | None, basic: BasicParameters
) -> Sample | Dropped:
    """Read the pictures, encode the text, cut at `cutoff_len`. Raises DataError for what cannot be read."""
    try:
        pixels_NP, grid_n3 = pictures.read(conversation.images) if pictures and conversation.images else (None, None)
    except DataError as fault:
        raise DataError(f"{conversation.sample_id}: {fault}") from fault
    counts = pictures.tokens(grid_n3) if pictures and grid_n3 is not None else []
    encoded = template.encode(
        conversation, counts, train_on_prompt=basic.train_on_prompt, mask_history=basic.mask_history
    )
    cut = basic.cutoff_len
    reason = _why_unfit(encoded, cut)
    if reason:
        return Dropped(conversation.sample_id, reason)
    kept = sum(end <= cut for _, end in encoded.image_runs)
    if grid_n3 is None or pixels_NP is None or not kept:
        pixels_NP = grid_n3 = None
    else:
        grid_n3 = grid_n3[:kept]
        pixels_NP = pixels_NP[: int(grid_n3.prod(-1).sum())]
    input_ids = _int64(encoded.input_ids[:cut])
    types = (input_ids == template.image_id).to(torch.int64)
    return Sample(conversation.sample_id, input_ids, _int64(encoded.labels[:cut]), types, pixels_NP, grid_n3)


def _why_unfit(encoded: Encoded, cut: int) -> str | None:
    """Why nothing can be learned from a sample cut at `cut` tokens; None if something can."""
    length = len(encoded.input_ids)
    for number, (begin, end) in enumerate(encoded.image_runs, start=1):
        if begin < cut < end:
            return (
                f"cutoff_len = {cut} falls inside picture {number} of {len(encoded.image_runs)} "
                f"(tokens {begin} to {end} of {length})"
            )
    # The first token is never predicted, so that a label there teaches nothing.
    if all(label == IGNORED for label in encoded.labels[1:cut]):
        return f"nothing is left to learn in its first {cut} of {length} tokens"
    return None


def _int64(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)

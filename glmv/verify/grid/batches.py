"""Micro-batches of few tokens that differ in everything a layout could get wrong; the same in every process."""

import torch

from glmv.data.batch import Batch
from glmv.ops.documents import document_ids
from glmv.ops.loss import unpredictable_ignored
from spec.model import Batch as LawBatch

PIXELS = 3 * 2 * 14 * 14
# A micro-batch is a list of samples, a sample a list of parts: an int is that many text tokens, a pair an image of so
# many patch rows and columns, a triple a video of so many temporal patches, rows and columns with a text token behind
# each. All text has labels, but for samples that TARGETS gives a number of them.
Part = int | tuple[int, ...]
MICRO_BATCHES: dict[str, list[list[Part]]] = {
    "picture": [[3, (4, 6), 6]],
    "wide_picture": [[5, (2, 8), 9]],
    "pictures": [[2, (2, 4), (6, 2), 5], [4, (4, 4), 2]],
    "text": [[11]],
    "one": [[9]],
    "three": [[9]],
    "ten": [[14]],
    "fifty": [[54]],
    "mixed_lengths": [[9], [9], [14], [54]],
    "masked": [[8]],
    "masked_picture": [[3, (2, 4), 3]],
    "video_beside_pictures": [[2, (2, 4), 1, (2, 2, 6), 3], [1, (2, 4, 2), (6, 2), 3]],
    "packed": [[2], [1, (2, 4), 5], [3, (2, 2, 4), 2], [14]],
}
TARGETS = {"one": [1], "three": [3], "ten": [10], "fifty": [50], "mixed_lengths": [1, 3, 10, 50]}
TARGETS |= {"masked": [0], "masked_picture": [0]}


def micro_batch(name: str) -> Batch:
    """Right-padded, or packed and padded; the same on every rank and in the test process."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    samples = MICRO_BATCHES[name]
    types = [[t for part in sample for t in _types(part)] for sample in samples]
    lengths, mask, borders = [len(row) for row in types], None, None
    if name == "packed":
        borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        types, mask = [[t for row in types for t in row] + [0] * 3], [[1] * sum(lengths) + [0] * 3]
    longest = max(map(len, types))
    types_BS = torch.tensor([row + [0] * (longest - len(row)) for row in types])
    mask_BS = torch.tensor(mask or [[1] * length + [0] * (longest - length) for length in lengths])
    ids_BS = torch.randint(1, 600, types_BS.shape, generator=generator)
    labels_BS = _labels(name, ids_BS.masked_fill((mask_BS == 0) | (types_BS != 0), -100))
    images = [[1, *part] for sample in samples for part in sample if isinstance(part, tuple) and len(part) == 2]
    videos = [[*part] for sample in samples for part in sample if isinstance(part, tuple) and len(part) == 3]
    return Batch(
        input_ids=ids_BS,
        attention_mask=mask_BS,
        labels=unpredictable_ignored(labels_BS, document_ids(mask_BS, borders)),
        mm_token_type_ids=types_BS,
        pixel_values=_pixels(images, generator),
        image_grid_thw=torch.tensor(images) if images else None,
        sample_ids=tuple(f"{name}-{row}" for row in range(len(samples))),
        pixel_values_videos=_pixels(videos, generator),
        video_grid_thw=torch.tensor(videos) if videos else None,
        cu_seqlens=borders,
    )


def _types(part: Part) -> list[int]:
    if isinstance(part, int):
        return [0] * part
    tokens = part[-2] * part[-1] // 4
    return [1] * tokens if len(part) == 2 else ([2] * tokens + [0]) * part[0]


def _pixels(grids: list[list[int]], generator: torch.Generator) -> torch.Tensor | None:
    patches = sum(t * rows * columns for t, rows, columns in grids)
    return torch.randn(patches, PIXELS, generator=generator, dtype=torch.float32) if grids else None


def _labels(name: str, labels_BS: torch.Tensor) -> torch.Tensor:
    for row, targets in enumerate(TARGETS.get(name, [])):
        labels_BS[row, targets + 1 :] = -100
        labels_BS[row, 0] = -100
    return labels_BS


def law_batch(name: str) -> LawBatch:
    """The same micro-batch for the law."""
    batch = micro_batch(name)
    return LawBatch(**{key: getattr(batch, key) for key in LawBatch.__dataclass_fields__ if hasattr(batch, key)})

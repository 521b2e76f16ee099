"""Micro-batches that differ from rank to rank, and what the law says about each."""

import functools
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from glmv.data.batch import Batch
from glmv.ops.documents import document_ids
from glmv.ops.loss import unpredictable_ignored
from spec.config import Config
from spec.model import Batch as LawBatch
from spec.numerics import Policy
from spec.train import Objective, contribution

PIXELS = 3 * 2 * 14 * 14
# A micro-batch is a list of samples, a sample a list of parts: an int is that many text tokens, a pair an image of so
# many patch rows and columns, a triple a video of so many temporal patches, rows and columns with a text token behind
# each. All text has labels, but for samples that TARGETS gives a number of them.
MICRO_BATCHES = {
    "picture": [[3, (4, 6), 6]],
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

# Four micro-batches each: one rank takes all of them in turn, two ranks two each, four ranks one each.
CASES = {
    "all_different": ["picture", "pictures", "text", "ten"],
    "text_beside_pictures": ["text", "one", "picture", "pictures"],
    "text_only": ["text", "one", "three", "ten"],
    "uneven_targets": ["one", "three", "ten", "fifty"],
    "uneven_targets_in_one_batch": ["mixed_lengths", "masked", "masked", "masked"],
    "videos_and_documents": ["picture", "masked", "video_beside_pictures", "packed"],
    "masked_ranks": ["masked_picture", "masked", "picture", "masked"],
}
# Two ranks, which accumulate twice, go through all cases and number formats; other worlds go through these.
CORE = ["all_different", "text_beside_pictures", "uneven_targets"]
# Micro-batches, samples and documents of unlike numbers of targets, one of none.
LOSS_TYPES = ["default", "per_sample_loss", "raw"]
LOSS_CASE = "videos_and_documents"
NOTHING_TO_LEARN = ["masked", "masked_picture", "masked", "masked"]


def cases_of(nproc: int) -> list[str]:
    """The cases that a world of this size runs."""
    return list(CASES) if nproc == 2 else CORE


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
        sample_ids=[f"{name}-{row}" for row in range(len(samples))],
        pixel_values_videos=_pixels(videos, generator),
        video_grid_thw=torch.tensor(videos) if videos else None,
        cu_seqlens=borders,
    )


def _types(part: int | tuple[int, ...]) -> list[int]:
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


class Law:
    """Loss and gradients of a list of micro-batches; each is computed once for each policy."""

    def __init__(self, directory: Path) -> None:
        self.weights = {k: w for f in sorted(directory.glob("*.safetensors")) for k, w in load_file(f).items()}
        self.config = Config.from_hf(json.loads((directory / "config.json").read_text()))

    def of(self, names, choices=None, loss_type="per_token_loss"):
        """A law for the `judge` fixture; `choices` pins the experts of each micro-batch by layer."""
        choices = choices or [{} for _ in names]
        targets = Objective.of([law_batch(name) for name in names]).targets
        divisor = targets if loss_type == "per_token_loss" else len(names)

        def law(policy: Policy):
            pins = [tuple((layer, _frozen(index)) for layer, index in choice.items()) for choice in choices]
            setting = policy.compute, policy.draw, loss_type
            parts = [self._part(name, *setting, pin) for name, pin in zip(names, pins, strict=True)]
            gradients = {k: sum(p.gradients[k] for p in parts) / divisor for k in parts[0].gradients}
            return {"loss": sum(part.loss for part in parts) / divisor, **gradients}

        return law

    @functools.cache  # noqa: B019 - the law lives as long as the test module
    def _part(self, name, compute, draw, loss_type, pin):
        """One micro-batch's part, but for the divisor that all parts of a step have in common."""
        pinned = {layer: torch.tensor(index) for layer, index in pin}
        alone = Objective(loss_type, targets=1, micro_batches=1)
        policy = Policy(compute, draw=draw)
        return contribution(self.weights, law_batch(name), alone, self.config, policy, pinned)


def _frozen(index_TK: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, index_TK.tolist()))

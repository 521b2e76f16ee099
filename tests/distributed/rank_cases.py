"""Micro-batches that differ from rank to rank, and what the law says about each."""

import functools
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from glmv.data.batch import Batch
from spec.config import Config
from spec.model import Batch as LawBatch
from spec.numerics import Policy
from spec.train import Objective, contribution

PIXELS = 3 * 2 * 14 * 14
# A micro-batch is a list of samples, a sample a list of parts: an int is that many text tokens, a pair an image of so
# many patch rows and columns. All text has labels, but for samples that TARGETS gives a number of them.
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
    "masked_ranks": ["masked_picture", "masked", "picture", "masked"],
}
# Two ranks, which accumulate twice, go through all cases and number formats; other worlds go through these.
CORE = ["all_different", "text_beside_pictures", "uneven_targets"]
NOTHING_TO_LEARN = ["masked", "masked_picture", "masked", "masked"]


def cases_of(nproc: int) -> list[str]:
    """The cases that a world of this size runs."""
    return list(CASES) if nproc == 2 else CORE


def micro_batch(name: str) -> Batch:
    """Right-padded; the same on every rank and in the test process."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    samples = MICRO_BATCHES[name]
    types = [[t for part in sample for t in _types(part)] for sample in samples]
    length = max(map(len, types))
    types_BS = torch.tensor([row + [0] * (length - len(row)) for row in types])
    mask_BS = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in types])
    ids_BS = torch.randint(1, 600, types_BS.shape, generator=generator)
    grids = [[1, *part] for sample in samples for part in sample if isinstance(part, tuple)]
    patches = sum(rows * columns for _, rows, columns in grids)
    return Batch(
        input_ids=ids_BS,
        attention_mask=mask_BS,
        labels=_labels(name, ids_BS.masked_fill((mask_BS == 0) | (types_BS == 1), -100)),
        mm_token_type_ids=types_BS,
        pixel_values=torch.randn(patches, PIXELS, generator=generator, dtype=torch.float32) if grids else None,
        image_grid_thw=torch.tensor(grids) if grids else None,
        sample_ids=[f"{name}-{row}" for row in range(len(samples))],
    )


def _types(part: int | tuple[int, int]) -> list[int]:
    return [0] * part if isinstance(part, int) else [1] * (part[0] * part[1] // 4)


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

    def of(self, names, choices=None):
        """A law for the `judge` fixture; `choices` pins the experts of each micro-batch by layer."""
        choices = choices or [{} for _ in names]
        targets = Objective.of([law_batch(name) for name in names]).targets

        def law(policy: Policy):
            pins = [tuple((layer, _frozen(index)) for layer, index in choice.items()) for choice in choices]
            parts = [self._part(n, policy.compute, policy.draw, pin) for n, pin in zip(names, pins, strict=True)]
            gradients = {k: sum(p.gradients[k] for p in parts) / targets for k in parts[0].gradients}
            return {"loss": sum(part.loss for part in parts) / targets, **gradients}

        return law

    @functools.cache  # noqa: B019 - the law lives as long as the test module
    def _part(self, name, compute, draw, pin):
        pinned = {layer: torch.tensor(index) for layer, index in pin}
        summed = Objective("per_token_loss", targets=1, micro_batches=1)
        policy = Policy(compute, draw=draw)
        return contribution(self.weights, law_batch(name), summed, self.config, policy, pinned)


def _frozen(index_TK: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, index_TK.tolist()))

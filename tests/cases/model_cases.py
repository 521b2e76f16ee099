"""Tiny models and batches, and what machine and law say about them."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from glmv.model import Glm4vMoeForConditionalGeneration, ModelConfig
from glmv.ops.documents import document_ids
from glmv.ops.kernels import Kernels
from glmv.ops.loss import cross_entropy, unpredictable_ignored
from spec import layout
from spec import loss as law_loss
from spec.config import Config
from spec.loss import IGNORED, next_token_targets
from spec.model import Batch, forward
from spec.numerics import Policy
from spec.train import is_trainable

PLAIN = Kernels()
PIXELS = 3 * 2 * 14 * 14
MERGE = 2
# A sample is a list of parts: an int is that many text tokens, a pair an image of so many patch rows and columns, a
# triple a video of so many temporal patches, rows and columns, each followed by one text token (its timestamp).
SAMPLES = {
    "text": [[9], [9]],
    "one_image": [[3, (4, 6), 4]],
    "images_not_square": [[2, (2, 10), 3, (8, 2), 2], [3, (6, 4), 8]],
    "image_first_and_last": [[(4, 2), 3, (2, 6)]],
    "images_adjacent": [[2, (4, 2), (2, 4), 3]],
    "padded_right": [[3, (4, 6), 5], [2, (2, 4), 2]],
    "padded_left": [[3, (4, 6), 5], [2, (2, 4), 2]],
    "text_padded_left": [[11], [4]],
    "video": [[2, (3, 4, 2), 3]],
    "image_and_video_padded_right": [[2, (2, 4), 1, (2, 2, 6), 2], [1, (2, 4, 2), (6, 2), 3], [4, (4, 4), 2]],
    "video_beside_image_padded_left": [[2, (2, 4), (2, 2, 4), 3], [3, (4, 2), 1], [4]],
    "packed": [[5], [1, (2, 4), 4], [3, (2, 2, 4), 2], [(4, 2), 3]],
    "packed_equal_lengths_and_padding": [[1, (4, 2), 4], [7], [7], [1], [3], 5],
}


def make_batch(case: str, seed: int = 0) -> Batch:
    """A batch of `SAMPLES`; padding is labelled -100 and its token ids are arbitrary."""
    generator = torch.Generator().manual_seed(seed)
    samples = [sample for sample in SAMPLES[case] if isinstance(sample, list)]
    types = [[kind for part in sample for kind in _types(part)] for sample in samples]
    documents = None
    if case.startswith("packed"):
        padding = sum(sample for sample in SAMPLES[case] if isinstance(sample, int))
        order = [number for number, row in enumerate(types) for _ in row] + [-1] * padding
        documents, types = torch.tensor([order]), [[*chain(*types)] + [0] * padding]
    length = max(map(len, types))
    masks = [_pad([1] * len(row), length, case) for row in types]
    types_BS, mask_BS = torch.tensor([_pad(row, length, case) for row in types]), torch.tensor(masks)
    mask_BS = mask_BS if documents is None else (documents >= 0).long()
    ids_BS = torch.randint(1, 600, types_BS.shape, generator=generator)
    images = [[1, *part] for sample in samples for part in sample if isinstance(part, tuple) and len(part) == 2]
    videos = [[*part] for sample in samples for part in sample if isinstance(part, tuple) and len(part) == 3]
    return Batch(
        input_ids=ids_BS,
        attention_mask=mask_BS,
        mm_token_type_ids=types_BS,
        pixel_values=_pixels(images, generator),
        image_grid_thw=torch.tensor(images) if images else None,
        labels=ids_BS.masked_fill((mask_BS == 0) | (types_BS != 0), -100),
        pixel_values_videos=_pixels(videos, generator),
        video_grid_thw=torch.tensor(videos) if videos else None,
        document_ids=documents,
    )


def _types(part: int | tuple[int, ...]) -> list[int]:
    if isinstance(part, int):
        return [0] * part
    tokens = part[-2] * part[-1] // MERGE**2
    return [1] * tokens if len(part) == 2 else ([2] * tokens + [0]) * part[0]


def _pixels(grids: list[list[int]], generator: torch.Generator) -> Tensor | None:
    patches = sum(t * rows * columns for t, rows, columns in grids)
    return torch.randn(patches, PIXELS, generator=generator, dtype=torch.float64) if grids else None


def _pad(row: list[int], length: int, case: str) -> list[int]:
    padding = [0] * (length - len(row))
    return padding + row if case.endswith("left") else row + padding


def cu_seqlens(batch: Batch) -> Tensor | None:
    """Where the documents of a packed batch begin and end, as the machine is told."""
    if batch.document_ids is None:
        return None
    lengths = batch.document_ids[batch.document_ids >= 0].bincount()
    return F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


class Tiny:
    """One tiny checkpoint: the law's weights and config, and models of the machine that hold the same numbers."""

    def __init__(self, directory: Path) -> None:
        files = sorted(directory.glob("*.safetensors"))
        self.weights: dict[str, Tensor] = {name: w for file in files for name, w in load_file(file).items()}
        self.law_config = Config.from_hf(json.loads((directory / "config.json").read_text()))
        self.config = ModelConfig.from_hf_dir(directory)

    def model(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", kernels: Kernels = PLAIN
    ) -> Glm4vMoeForConditionalGeneration:
        """A machine in `dtype` with the checkpoint's weights."""
        model = Glm4vMoeForConditionalGeneration(self.config, kernels)
        model.load_state_dict(layout.stacked(self.weights))
        return model.to(dtype).to(device)

    def law(self, batch: Batch, pinned: dict[int, Tensor]) -> Callable[[Policy], dict[str, Tensor]]:
        """Logits of real tokens, summed loss and every gradient."""
        real_BS = batch.attention_mask.bool()

        def law(policy: Policy) -> dict[str, Tensor]:
            masters = {name: policy.widen(w).requires_grad_(is_trainable(name)) for name, w in self.weights.items()}
            trained = {name: w for name, w in masters.items() if w.requires_grad}
            logits = forward(masters, self.law_config, batch, policy, pinned).logits
            target_BS = next_token_targets(batch.labels, batch.documents)
            loss = law_loss.cross_entropy(logits, target_BS, (target_BS != IGNORED).double(), policy)
            found = torch.autograd.grad(loss, trained.values(), allow_unused=True, materialize_grads=True)
            return {"logits": logits.detach()[real_BS], "loss": loss.detach(), **dict(zip(trained, found, strict=True))}

        return law


def run(model: Glm4vMoeForConditionalGeneration, batch: Batch) -> Tensor:
    """The machine's logits [B, S, V]."""
    dtype, device = model.lm_head.weight.dtype, model.lm_head.weight.device
    given = {
        "input_ids_BS": batch.input_ids,
        "attention_mask_BS": batch.attention_mask,
        "mm_token_type_ids_BS": batch.mm_token_type_ids,
        "pixel_values_NP": batch.pixel_values,
        "image_grid_thw": batch.image_grid_thw,
        "pixel_values_videos_NP": batch.pixel_values_videos,
        "video_grid_thw": batch.video_grid_thw,
        "cu_seqlens": cu_seqlens(batch),
    }
    on = {name: t.to(device, dtype if t.is_floating_point() else None) for name, t in given.items() if t is not None}
    return model(**on)


@contextmanager
def choices(model: Glm4vMoeForConditionalGeneration) -> Iterator[dict[int, Tensor]]:
    """Collects the expert choices [T, K] by layer while the model runs."""
    chosen: dict[int, Tensor] = {}
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out, index=index: chosen.update({index: out[0].cpu()}))
        for index, layer in enumerate(model.model.language_model.layers)
        if hasattr(layer.mlp, "gate")
    ]
    yield chosen
    for hook in hooks:
        hook.remove()


def answers(model: Glm4vMoeForConditionalGeneration, batch: Batch) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    """What the law is asked for, and the expert choices."""
    model.zero_grad()
    with choices(model) as chosen:
        logits = run(model, batch)
    labels_BS = unpredictable_ignored(batch.labels, document_ids(batch.attention_mask, cu_seqlens(batch)))
    loss = cross_entropy(logits, labels_BS.to(logits.device), torch.ones(labels_BS.shape))
    loss.backward()
    return {"logits": logits.cpu()[batch.attention_mask.bool()], "loss": loss, **gradients(model)}, chosen


def gradients(model: Glm4vMoeForConditionalGeneration) -> dict[str, Tensor]:
    """Every parameter's gradient under its published name."""
    return layout.per_expert({name: parameter.grad for name, parameter in model.named_parameters()})

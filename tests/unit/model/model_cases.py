"""Tiny models and batches, and what machine and law say about them."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from glmv.model import Glm4vMoeForConditionalGeneration, ModelConfig
from glmv.ops.loss import token_cross_entropy
from spec import layout
from spec.config import Config
from spec.loss import IGNORED, cross_entropy, next_token_targets
from spec.model import Batch, forward
from spec.numerics import Policy
from spec.train import is_trainable

PIXELS = 3 * 2 * 14 * 14
MERGE = 2
# A sample is a list of parts: an int is that many text tokens, a pair an image of so many patch rows and columns.
SAMPLES = {
    "text": [[9], [9]],
    "one_image": [[3, (4, 6), 4]],
    "images_not_square": [[2, (2, 10), 3, (8, 2), 2], [3, (6, 4), 8]],
    "image_first_and_last": [[(4, 2), 3, (2, 6)]],
    "images_adjacent": [[2, (4, 2), (2, 4), 3]],
    "padded_right": [[3, (4, 6), 5], [2, (2, 4), 2]],
    "padded_left": [[3, (4, 6), 5], [2, (2, 4), 2]],
    "text_padded_left": [[11], [4]],
}


def make_batch(case: str, seed: int = 0) -> Batch:
    """A batch of `SAMPLES`; padding is labelled -100 and its token ids are arbitrary."""
    generator = torch.Generator().manual_seed(seed)
    types = [[kind for part in sample for kind in _types(part)] for sample in SAMPLES[case]]
    grids = [[1, *part] for sample in SAMPLES[case] for part in sample if isinstance(part, tuple)]
    length = max(map(len, types))
    masks = [_pad([1] * len(row), length, case) for row in types]
    types_BS, mask_BS = torch.tensor([_pad(row, length, case) for row in types]), torch.tensor(masks)
    ids_BS = torch.randint(1, 600, types_BS.shape, generator=generator)
    patches = sum(rows * columns for _, rows, columns in grids)
    return Batch(
        input_ids=ids_BS,
        attention_mask=mask_BS,
        mm_token_type_ids=types_BS,
        pixel_values=torch.randn(patches, PIXELS, generator=generator, dtype=torch.float64) if grids else None,
        image_grid_thw=torch.tensor(grids) if grids else None,
        labels=ids_BS.masked_fill((mask_BS == 0) | (types_BS == 1), -100),
    )


def _types(part: int | tuple[int, int]) -> list[int]:
    return [0] * part if isinstance(part, int) else [1] * (part[0] * part[1] // MERGE**2)


def _pad(row: list[int], length: int, case: str) -> list[int]:
    padding = [0] * (length - len(row))
    return padding + row if case.endswith("left") else row + padding


class Tiny:
    """One tiny checkpoint: the law's weights and config, and models of the machine that hold the same numbers."""

    def __init__(self, directory: Path) -> None:
        files = sorted(directory.glob("*.safetensors"))
        self.weights: dict[str, Tensor] = {name: w for file in files for name, w in load_file(file).items()}
        self.law_config = Config.from_hf(json.loads((directory / "config.json").read_text()))
        self.config = ModelConfig.from_hf_dir(directory)

    def model(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", **options: object
    ) -> Glm4vMoeForConditionalGeneration:
        """A machine in `dtype` with the checkpoint's weights."""
        model = Glm4vMoeForConditionalGeneration(self.config, **options)
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
            loss = cross_entropy(logits, target_BS, (target_BS != IGNORED).double(), policy)
            found = torch.autograd.grad(loss, trained.values(), allow_unused=True, materialize_grads=True)
            return {"logits": logits.detach()[real_BS], "loss": loss.detach(), **dict(zip(trained, found, strict=True))}

        return law


def run(model: Glm4vMoeForConditionalGeneration, batch: Batch) -> Tensor:
    """The machine's logits [B, S, V]."""
    on = {name: None if t is None else t.to(model.lm_head.weight.device) for name, t in vars(batch).items()}
    pixels = on["pixel_values"]
    return model(
        on["input_ids"],
        attention_mask_BS=on["attention_mask"],
        mm_token_type_ids_BS=on["mm_token_type_ids"],
        pixel_values_NP=None if pixels is None else pixels.to(model.lm_head.weight.dtype),
        image_grid_thw=on["image_grid_thw"],
    )


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
    loss = token_cross_entropy(logits, batch.labels.to(logits.device))
    loss.backward()
    return {"logits": logits.cpu()[batch.attention_mask.bool()], "loss": loss, **gradients(model)}, chosen


def gradients(model: Glm4vMoeForConditionalGeneration) -> dict[str, Tensor]:
    """Every parameter's gradient under its published name."""
    return layout.per_expert({name: parameter.grad for name, parameter in model.named_parameters()})

"""The third witness: a small HF GLM-4.5V with random weights, and the batches on which it must agree with the law."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.models.glm4v_moe.configuration_glm4v_moe import Glm4vMoeConfig
from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeForConditionalGeneration

from spec.config import Config
from spec.layout import per_expert
from spec.model import Batch
from spec.train import Objective

VOCAB, IMAGE, PAD, PATCH_VALUES = 97, 90, 0, 3 * 2 * 14 * 14
HF_CONFIG = {
    "text_config": {
        "vocab_size": VOCAB,
        "hidden_size": 72,
        "intermediate_size": 104,
        "moe_intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        "pad_token_id": PAD,
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 48,
        "num_heads": 4,
        "out_hidden_size": 72,
        "intermediate_size": 88,
        "image_size": 84,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "rms_norm_eps": 1e-5,
    },
    "image_token_id": IMAGE,
    "video_token_id": 91,
    "image_start_token_id": 92,
    "image_end_token_id": 93,
    "video_start_token_id": 94,
    "video_end_token_id": 95,
}


@dataclass(frozen=True)
class Witness:
    """HF's model, what it says of a batch, and its weights under published names."""

    model: torch.nn.Module
    config: Config
    weights: dict[str, Tensor]

    def testify(self, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[int, Tensor]]:
        """(logits, loss, gradients, expert choice by layer) of HF's forward and backward."""
        self.model.zero_grad()
        with self.choices() as chosen:
            out = self.model(**inputs(batch), use_cache=False)
        out.loss.backward()
        return out.logits.detach(), out.loss.detach(), self.gradients(), chosen

    def testify_together(self, batches: list[Batch]) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[int, Tensor]]:
        """The same for batches that HF reads one by one: tokens in a row, the loss a mean over all their targets."""
        self.model.zero_grad()
        rows, loss, chosen = [], torch.zeros(()), []
        objective = Objective.of(batches)
        for batch in batches:
            with self.choices() as own:
                out = self.model(**inputs(batch), use_cache=False)
            part = out.loss * Objective.of([batch]).targets / objective.targets
            part.backward()
            rows.append(out.logits.detach()[batch.attention_mask.bool()])
            loss += part.detach()
            chosen.append(own)
        together = {layer: torch.cat([own[layer] for own in chosen]) for layer in chosen[0]}
        return torch.cat(rows), loss, self.gradients(), together

    def gradients(self) -> dict[str, Tensor]:
        """What the last backward left, zeros where it left nothing."""
        found = self.model.named_parameters()
        return published({n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in found})

    @contextmanager
    def choices(self) -> Iterator[dict[int, Tensor]]:
        """Collects the expert choices [T, K] by layer while the model runs."""
        chosen: dict[int, Tensor] = {}
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda _, __, out, index=index: chosen.update({index: out[2]}))
            for index, layer in enumerate(self.model.model.language_model.layers)
            if hasattr(layer.mlp, "gate")
        ]
        yield chosen
        for hook in hooks:
            hook.remove()


def inputs(batch: Batch) -> dict[str, Tensor]:
    """HF's arguments; HF knows nothing of documents."""
    return {name: t for name, t in vars(batch).items() if t is not None and name != "document_ids"}


def published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """HF's live names ([E, 2I, H] and [E, H, I]) to the names of the hub's files."""
    experts = ("experts.gate_up_proj", "experts.down_proj")
    return per_expert({n: t.transpose(1, 2) if n.endswith(experts) else t for n, t in tensors.items()})


def build_witness(text: dict | None = None, vision: dict | None = None) -> Witness:
    torch.manual_seed(0)
    mapping = HF_CONFIG | {
        "text_config": HF_CONFIG["text_config"] | (text or {}),
        "vision_config": HF_CONFIG["vision_config"] | (vision or {}),
    }
    model = Glm4vMoeForConditionalGeneration._from_config(Glm4vMoeConfig(**mapping), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.1
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
        biases = {n: b.normal_(0, 0.1) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return Witness(model, Config.from_hf(mapping), published(tensors | biases))


@dataclass(frozen=True)
class Video:
    """A video of so many temporal patches, each of height x width patches."""

    frames: int
    height: int
    width: int


def write_segment(segment: int | tuple[int, int] | Video, random: torch.Generator) -> tuple[list[int], list[int]]:
    """(ids, token types) of a run of text, an image, or a video in GLM's form: a bracketed run per temporal patch."""
    if isinstance(segment, int):
        return torch.randint(1, IMAGE, (segment,), generator=random).tolist(), [0] * segment
    video = isinstance(segment, Video)
    tokens = (segment.height * segment.width if video else segment[0] * segment[1]) // 4
    ids, types = [92] + [IMAGE] * tokens + [93], [0] + [2 if video else 1] * tokens + [0]
    if not video:
        return ids, types
    stamped = [([*ids, 7 + frame], [*types, 0]) for frame in range(segment.frames)]
    return [94, *(i for part, _ in stamped for i in part), 95], [0, *(t for _, part in stamped for t in part), 0]


def make_batch(samples: list[list[int | tuple[int, int] | Video]], padding: str = "right", seed: int = 1) -> Batch:
    """Samples from segments: a number of text tokens, (height, width) of an image in patches, or a video."""
    random = torch.Generator().manual_seed(seed)
    rows = [[write_segment(segment, random) for segment in segments] for segments in samples]
    length = max(sum(len(ids) for ids, _ in row) for row in rows)

    def table(part: int) -> Tensor:
        flat = [[value for segment in row for value in segment[part]] for row in rows]
        blank = [[PAD] * (length - len(values)) for values in flat]
        return torch.tensor([b + v if padding == "left" else v + b for v, b in zip(flat, blank, strict=True)])

    input_ids, types = table(0), table(1)
    attention_mask = (input_ids != PAD).long()
    labels = input_ids.masked_fill((types != 0) | (attention_mask == 0), -100)
    labels[:, : length // 3] = -100
    labels[:, 1:][attention_mask[:, :-1] == 0] = -100  # padding predicts nothing
    segments = [segment for row in samples for segment in row]
    images = [[1, *segment] for segment in segments if isinstance(segment, tuple)]
    videos = [[v.frames, v.height, v.width] for v in segments if isinstance(v, Video)]
    pixels = [_pixels(grids, random) for grids in (images, videos)]
    grids = [torch.tensor(found) if found else None for found in (images, videos)]
    return Batch(input_ids, attention_mask, types, pixels[0], grids[0], labels, pixels[1], grids[1])


def _pixels(grids: list[list[int]], random: torch.Generator) -> Tensor | None:
    patches = sum(t * h * w for t, h, w in grids)
    return torch.randn(patches, PATCH_VALUES, generator=random) if patches else None


def pack(batches: list[Batch]) -> Batch:
    """Batches of one unpadded sample each, as the documents of one row."""
    row = {
        name: torch.cat([getattr(b, name) for b in batches], 1)
        for name in ("input_ids", "attention_mask", "mm_token_type_ids", "labels")
    }
    documents = torch.cat([torch.full_like(b.input_ids, number) for number, b in enumerate(batches)], 1)
    for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        parts = [getattr(b, name) for b in batches if getattr(b, name) is not None]
        row[name] = torch.cat(parts) if parts else None
    return Batch(**row, document_ids=documents)


BATCHES = {
    "text_only": lambda: make_batch([[23]]),
    "one_image": lambda: make_batch([[4, (4, 6), 9]]),
    "non_square_images": lambda: make_batch([[3, (4, 6), 5, (2, 8), 6], [2, (10, 4), 11]]),
    "image_first_and_last": lambda: make_batch([[(2, 6), 9, (4, 2)]]),
    "right_padding": lambda: make_batch([[3, (4, 2), 17], [6]]),
    "left_padding": lambda: make_batch([[3, (4, 2), 17], [2, (2, 6), 4]], padding="left"),
    "few_tokens": lambda: make_batch([[5]]),
    "video": lambda: make_batch([[3, Video(3, 2, 4), 9]]),
    "two_videos_padded": lambda: make_batch([[3, Video(2, 4, 2), 9], [Video(1, 2, 6), 4]]),
}

"""The third witness: a small HF GLM-4.5V with random weights, and the batches on which it must agree with the law."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.models.glm4v_moe.configuration_glm4v_moe import Glm4vMoeConfig
from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeForConditionalGeneration

from spec.config import Config
from spec.layout import per_expert
from spec.model import Batch

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
        chosen: dict[int, Tensor] = {}
        layers = self.model.model.language_model.layers
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda _, __, out, index=index: chosen.update({index: out[2]}))
            for index, layer in enumerate(layers)
            if hasattr(layer.mlp, "gate")
        ]
        self.model.zero_grad()
        out = self.model(**{name: value for name, value in vars(batch).items() if value is not None}, use_cache=False)
        out.loss.backward()
        for hook in hooks:
            hook.remove()
        zero = torch.zeros
        gradients = {n: zero(p.shape) if p.grad is None else p.grad for n, p in self.model.named_parameters()}
        return out.logits.detach(), out.loss.detach(), published(gradients), chosen


def published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """HF's live names ([E, 2I, H] and [E, H, I]) to the names of the hub's files."""
    experts = ("experts.gate_up_proj", "experts.down_proj")
    return per_expert({n: t.transpose(1, 2) if n.endswith(experts) else t for n, t in tensors.items()})


def build_witness(**text_overrides) -> Witness:
    torch.manual_seed(0)
    mapping = HF_CONFIG | {"text_config": HF_CONFIG["text_config"] | text_overrides}
    model = Glm4vMoeForConditionalGeneration._from_config(Glm4vMoeConfig(**mapping), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.1
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
        biases = {n: b.normal_(0, 0.1) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return Witness(model, Config.from_hf(mapping), published(tensors | biases))


def make_batch(samples: list[list[int | tuple[int, int]]], padding: str = "right", seed: int = 1) -> Batch:
    """Samples from segments: an int is a run of so many text tokens, (height, width) an image of so many patches."""
    random = torch.Generator().manual_seed(seed)
    rows, grids = [], []
    for segments in samples:
        ids: list[int] = []
        for segment in segments:
            if isinstance(segment, int):
                ids += torch.randint(1, IMAGE, (segment,), generator=random).tolist()
            else:
                grids.append([1, *segment])
                ids += [92] + [IMAGE] * (segment[0] * segment[1] // 4) + [93]
        rows.append(ids)
    length = max(map(len, rows))
    blank = [[PAD] * (length - len(ids)) for ids in rows]
    input_ids = torch.tensor([pad + ids if padding == "left" else ids + pad for ids, pad in zip(rows, blank)])
    attention_mask = (input_ids != PAD).long()
    is_image = (input_ids == IMAGE).long()
    labels = input_ids.masked_fill((is_image == 1) | (attention_mask == 0), -100)
    labels[:, : length // 3] = -100
    labels[:, 1:][attention_mask[:, :-1] == 0] = -100  # padding predicts nothing
    patches = sum(h * w for _, h, w in grids)
    pixels = torch.randn(patches, PATCH_VALUES, generator=random) if grids else None
    return Batch(input_ids, attention_mask, is_image, pixels, torch.tensor(grids) if grids else None, labels)


BATCHES = {
    "text_only": lambda: make_batch([[23]]),
    "one_image": lambda: make_batch([[4, (4, 6), 9]]),
    "non_square_images": lambda: make_batch([[3, (4, 6), 5, (2, 8), 6], [2, (10, 4), 11]]),
    "right_padding": lambda: make_batch([[3, (4, 2), 17], [6]]),
    "left_padding": lambda: make_batch([[3, (4, 2), 17], [2, (2, 6), 4]], padding="left"),
    "few_tokens": lambda: make_batch([[5]]),
}

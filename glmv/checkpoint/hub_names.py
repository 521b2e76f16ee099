"""Every tensor of a published GLM-4.5V directory: its name, shape and dtype, in model order.

Source: the weight table of zai-org/GLM-4.5V (18,106 tensors, bfloat16 but for the router's float32 bias). The converter
holds a directory against this list, and `make-tiny` fills it.
"""
# Shapes: V vocab, H hidden, E routed experts, I moe intermediate, D head dim.

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from glmv.model.config import ModelConfig, TextConfig, VisionConfig

LAYER_PREFIX = "model.language_model.layers."


class HubTensor(NamedTuple):
    """One tensor as the hub stores it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16


def hub_tensors(config: ModelConfig) -> list[HubTensor]:
    """List what a complete Hugging Face directory of this architecture holds, experts one by one."""
    head = HubTensor("lm_head.weight", (config.text.vocab_size, config.text.hidden_size))
    return [*_vision(config.vision), *_text(config.text), head]


def _text(text: TextConfig) -> Iterator[HubTensor]:
    hidden = text.hidden_size
    yield HubTensor("model.language_model.embed_tokens.weight", (text.vocab_size, hidden))
    for layer in range(text.num_hidden_layers):
        prefix = f"{LAYER_PREFIX}{layer}."
        yield HubTensor(f"{prefix}input_layernorm.weight", (hidden,))
        yield from _attention(f"{prefix}self_attn.", text)
        yield HubTensor(f"{prefix}post_attention_layernorm.weight", (hidden,))
        if layer < text.first_k_dense_replace:
            yield from _swiglu(f"{prefix}mlp.", hidden, text.intermediate_size)
        else:
            yield from _experts(f"{prefix}mlp.", text)
    yield HubTensor("model.language_model.norm.weight", (hidden,))


def _attention(prefix: str, text: TextConfig) -> Iterator[HubTensor]:
    widths = {"q": text.num_attention_heads, "k": text.num_key_value_heads, "v": text.num_key_value_heads}
    for letter, heads in widths.items():
        width = heads * text.head_dim
        yield HubTensor(f"{prefix}{letter}_proj.weight", (width, text.hidden_size))
        if text.attention_bias:
            yield HubTensor(f"{prefix}{letter}_proj.bias", (width,))
    yield HubTensor(f"{prefix}o_proj.weight", (text.hidden_size, text.num_attention_heads * text.head_dim))


def _experts(prefix: str, text: TextConfig) -> Iterator[HubTensor]:
    yield HubTensor(f"{prefix}gate.weight", (text.n_routed_experts, text.hidden_size))
    yield HubTensor(f"{prefix}gate.e_score_correction_bias", (text.n_routed_experts,), torch.float32)
    for expert in range(text.n_routed_experts):
        yield from _swiglu(f"{prefix}experts.{expert}.", text.hidden_size, text.moe_intermediate_size)
    shared = text.moe_intermediate_size * text.n_shared_experts
    yield from _swiglu(f"{prefix}shared_experts.", text.hidden_size, shared)


def _swiglu(prefix: str, width: int, inner: int) -> Iterator[HubTensor]:
    yield HubTensor(f"{prefix}gate_proj.weight", (inner, width))
    yield HubTensor(f"{prefix}up_proj.weight", (inner, width))
    yield HubTensor(f"{prefix}down_proj.weight", (width, inner))


def _vision(vision: VisionConfig) -> Iterator[HubTensor]:
    hidden, out, merge = vision.hidden_size, vision.out_hidden_size, vision.spatial_merge_size
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    yield HubTensor("model.visual.patch_embed.proj.weight", (hidden, *patch))
    yield HubTensor("model.visual.patch_embed.proj.bias", (hidden,))
    positions = (vision.image_size // vision.patch_size) ** 2
    yield HubTensor("model.visual.embeddings.position_embedding.weight", (positions, hidden))
    yield HubTensor("model.visual.post_conv_layernorm.weight", (hidden,))
    for block in range(vision.depth):
        yield from _vision_block(f"model.visual.blocks.{block}.", vision)
    yield HubTensor("model.visual.post_layernorm.weight", (hidden,))
    yield HubTensor("model.visual.downsample.weight", (out, hidden, merge, merge))
    yield HubTensor("model.visual.downsample.bias", (out,))
    yield HubTensor("model.visual.merger.proj.weight", (out, out))
    yield HubTensor("model.visual.merger.post_projection_norm.weight", (out,))
    yield HubTensor("model.visual.merger.post_projection_norm.bias", (out,))
    yield from _swiglu("model.visual.merger.", out, vision.intermediate_size)


def _vision_block(prefix: str, vision: VisionConfig) -> Iterator[HubTensor]:
    hidden = vision.hidden_size
    yield HubTensor(f"{prefix}norm1.weight", (hidden,))
    yield HubTensor(f"{prefix}attn.qkv.weight", (3 * hidden, hidden))
    yield HubTensor(f"{prefix}attn.proj.weight", (hidden, hidden))
    yield HubTensor(f"{prefix}norm2.weight", (hidden,))
    # The block's MLP is as wide as the tower's output; `intermediate_size` belongs to the merger.
    yield from _swiglu(f"{prefix}mlp.", hidden, vision.out_hidden_size)

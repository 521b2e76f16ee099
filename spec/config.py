"""The numbers of a GLM-4.5V model that its formulas use, read from a `config.json` mapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TextConfig:
    """The text decoder (`text_config`). Field names are the config keys."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    partial_rotary_factor: float
    mrope_section: tuple[int, ...]
    first_k_dense_replace: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float

    @property
    def rotary_dim(self) -> int:
        """How many of a head's dimensions rotate; the rest pass through."""
        return int(self.head_dim * self.partial_rotary_factor)


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower (`vision_config`). Field names are the config keys."""

    depth: int
    hidden_size: int
    num_heads: int
    image_size: int
    patch_size: int
    spatial_merge_size: int
    rms_norm_eps: float
    rope_theta: float

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def table_side(self) -> int:
        """Side of the square table of learned position embeddings."""
        return self.image_size // self.patch_size


@dataclass(frozen=True)
class Config:
    """GLM-4.5V: text decoder and vision tower."""

    text: TextConfig
    vision: VisionConfig

    @classmethod
    def from_hf(cls, mapping: Mapping[str, Any]) -> Config:
        """Read a `config.json`, with the rope keys of either style (`rope_scaling` or `rope_parameters`)."""
        text, vision = mapping["text_config"], mapping["vision_config"]
        text_rope = {**text, **(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
        vision_rope = vision.get("rope_parameters") or {}
        return cls(
            text=TextConfig(
                **{name: text[name] for name in _TEXT_KEYS},
                rope_theta=text_rope["rope_theta"],
                partial_rotary_factor=text_rope.get("partial_rotary_factor", 0.5),
                mrope_section=tuple(text_rope["mrope_section"]),
            ),
            vision=VisionConfig(
                **{name: vision[name] for name in _VISION_KEYS}, rope_theta=vision_rope.get("rope_theta", 10000.0)
            ),
        )


_ROPE_KEYS = {"rope_theta", "partial_rotary_factor", "mrope_section"}
_TEXT_KEYS = [name for name in TextConfig.__dataclass_fields__ if name not in _ROPE_KEYS]
_VISION_KEYS = [name for name in VisionConfig.__dataclass_fields__ if name not in _ROPE_KEYS]

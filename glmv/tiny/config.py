"""config.json of the tiny model: GLM-4.5V's file with small numbers.

Hidden sizes, expert widths and counts are pairwise different, so that a transposed or swapped tensor can't fit.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

_TEXT: dict[str, Any] = {
    "model_type": "glm4v_moe_text",
    "vocab_size": 640,
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "use_qk_norm": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "initializer_range": 0.02,
    "max_position_embeddings": 65536,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_VISION: dict[str, Any] = {
    "model_type": "glm4v_moe",
    "depth": 2,
    "hidden_size": 48,
    "num_heads": 4,
    "out_hidden_size": 72,
    "intermediate_size": 88,
    "in_channels": 3,
    "image_size": 84,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_dropout_prob": 0.0,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-05,
}
# config.json's field, and the token of which it gives the id.
_TOKEN_FIELDS = {
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
}
_EOS = ("<|endoftext|>", "<|user|>", "<|observation|>")


def hub_config(token_ids: Mapping[str, int], overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Build config.json in the hub's (pre-v5) style.

    Args:
        token_ids: id of every special token.
        overrides: fields to replace, nested as in the file: `{"text_config": {"num_hidden_layers": 5}}`.
    """
    ids = {field: token_ids[token] for field, token in _TOKEN_FIELDS.items()}
    ends = {"pad_token_id": token_ids["<|endoftext|>"], "eos_token_id": [token_ids[token] for token in _EOS]}
    placeholders = {field: ids[field] for field in ("image_token_id", "video_token_id")}
    config: dict[str, Any] = {
        "architectures": ["Glm4vMoeForConditionalGeneration"],
        "model_type": "glm4v_moe",
        "text_config": {**copy.deepcopy(_TEXT), **ends, **placeholders},
        "vision_config": dict(_VISION),
        **ids,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.55.0.dev0",
    }
    _replace(config, overrides or {})
    return config


def generation_config(token_ids: Mapping[str, int]) -> dict[str, Any]:
    """Build generation_config.json."""
    return {
        "_from_model_config": True,
        "do_sample": True,
        "eos_token_id": [token_ids[token] for token in _EOS],
        "pad_token_id": token_ids["<|endoftext|>"],
        "temperature": 1.0,
        "top_k": 1,
        "top_p": 0.0001,
    }


def image_processor_config() -> dict[str, Any]:
    """Build preprocessor_config.json: GLM's pixel budget and CLIP's mean and deviation."""
    return {
        "size": {"shortest_edge": 12544, "longest_edge": 11760000},
        **_pixels("Glm4vProcessor"),
        "image_processor_type": "Glm4vImageProcessor",
    }


def video_processor_config() -> dict[str, Any]:
    """Build video_preprocessor_config.json."""
    return {
        "size": {"shortest_edge": 12544, "longest_edge": 47040000},
        **_pixels("Glm4vProcessor"),
        "fps": 2,
        "max_duration": 300,
        "video_processor_type": "Glm4vVideoProcessor",
    }


def _pixels(processor_class: str) -> dict[str, Any]:
    return {
        "do_rescale": True,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "processor_class": processor_class,
    }


def _replace(config: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    for key, value in overrides.items():
        if isinstance(value, Mapping) and isinstance(config.get(key), dict):
            _replace(config[key], value)
        else:
            config[key] = value

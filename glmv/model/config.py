"""The architecture, read from the model's own config.json.

Both spellings of the rotary settings are read: the hub's (`rope_scaling`, `rope_theta`, `partial_rotary_factor`) and
transformers 5's (`rope_parameters`). Keys that do not concern the architecture are ignored (`glmv.model.config_keys`
lists them); a key that asks for something GLM-4.5V is not, or that nobody knows, is refused.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from glmv.errors import GlmvError
from glmv.model.config_keys import BOOKKEEPING, ROPE, WITHOUT_EFFECT, unknown_key

logger = logging.getLogger("glmv.model")


class ConfigError(GlmvError):
    """A model configuration that cannot be built: file, key, value, reason."""


class Section(BaseModel):
    """A frozen part of config.json: every key is read, built in, known to have no effect, or refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def refuse_other_architectures(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Settings that would change the computation must have a value that is built; the others must be known."""
        for key, built in cls.only().items():
            if values.get(key, built[0]) not in built:
                raise ValueError(f"{key} = {values[key]!r}: only {' or '.join(map(repr, built))} is built")
        cls.refuse_unknown_keys(values)
        return values

    @classmethod
    def only(cls) -> dict[str, tuple[object, ...]]:
        """Keys that are not read, and the values that mean what is built."""
        return {}

    @classmethod
    def refuse_unknown_keys(cls, values: Mapping[str, Any]) -> None:
        """A key that may be a misspelt or a foreign setting."""
        known = {*cls.model_fields, *cls.only(), "rope_theta", "rope_scaling", "rope_parameters"}
        fault = unknown_key(values, known, BOOKKEEPING | WITHOUT_EFFECT)
        require(fault is None, fault or "")


def require(holds: bool, message: str) -> None:
    """Raise ValueError(message), which pydantic collects, unless `holds`."""
    if not holds:
        raise ValueError(message)


def require_multiple(section: Section, key: str, divisor_key: str) -> None:
    """Require that one field is a multiple of another."""
    value, divisor = getattr(section, key), getattr(section, divisor_key)
    require(value % divisor == 0, f"{key} = {value} is no multiple of {divisor_key} = {divisor}")


def flatten_rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """Lift rope_theta, partial_rotary_factor and mrope_section out of `rope_scaling` and `rope_parameters`.

    The newest spelling wins: `rope_parameters`, then `rope_scaling`, then the top level.
    """
    flat = dict(values)
    for name in ("rope_scaling", "rope_parameters"):
        group = values.get(name) or {}
        require(isinstance(group, Mapping), f"{name} = {group!r} is no object")
        kind = group.get("rope_type", group.get("type", "default"))
        require(kind in ("default", "mrope", "axial"), f"rope_type = {kind!r}: only 'default' is built")
        fault = unknown_key(group, ROPE)
        require(fault is None, f"{name}.{fault}")
        flat |= {key: group[key] for key in ("rope_theta", "partial_rotary_factor", "mrope_section") if key in group}
    for key in ("rope_theta", "partial_rotary_factor"):
        if isinstance(flat.get(key), int):
            flat[key] = float(flat[key])
    return flat


class TextConfig(Section):
    """The text decoder (field names and defaults are transformers', `Glm4vMoeTextConfig`)."""

    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    attention_bias: bool = True
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)
    partial_rotary_factor: float = Field(default=0.5, gt=0, le=1)
    mrope_section: tuple[int, ...] = (8, 12, 12)
    moe_intermediate_size: int = Field(gt=0)
    n_routed_experts: int = Field(gt=0)
    n_shared_experts: int = Field(default=1, gt=0)
    num_experts_per_tok: int = Field(gt=0)
    first_k_dense_replace: int = Field(default=1, ge=0)
    n_group: int = Field(default=1, gt=0)
    topk_group: int = Field(default=1, gt=0)
    norm_topk_prob: bool = True
    routed_scaling_factor: float = Field(default=1.0, gt=0)
    pad_token_id: int | None = None

    @classmethod
    def only(cls) -> dict[str, tuple[object, ...]]:
        """No qk-norm weights exist in GLM-4.5V; dropout is not built; routing is aux-free, on sigmoid scores."""
        return {
            "model_type": ("glm4v_moe_text",),
            "hidden_act": ("silu",),
            "use_qk_norm": (False,),
            "attention_dropout": (0,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
        }

    @model_validator(mode="before")
    @classmethod
    def read_both_spellings(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Rotary settings to the top level; head_dim from hidden_size where the file has none."""
        flat = flatten_rope(values)
        if isinstance(flat.get("mrope_section"), list):
            flat["mrope_section"] = tuple(flat["mrope_section"])
        hidden, heads = flat.get("hidden_size"), flat.get("num_attention_heads")
        if flat.get("head_dim") is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            head_dim, rest = divmod(hidden, heads)
            require(rest == 0, "head_dim is missing, and hidden_size is no multiple of num_attention_heads")
            flat["head_dim"] = head_dim
        return flat

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that RoPE turns; the rest pass through."""
        return int(self.head_dim * self.partial_rotary_factor)

    @model_validator(mode="after")
    def fit_attention(self) -> Self:
        """Heads, rotary channels and M-RoPE sections."""
        require_multiple(self, "num_attention_heads", "num_key_value_heads")
        require(self.rotary_dim % 2 == 0, f"head_dim x partial_rotary_factor = {self.rotary_dim} is odd")
        total, half = sum(self.mrope_section), self.rotary_dim // 2
        require(
            total == half,
            f"mrope_section = {list(self.mrope_section)} sums to {total}, but half of the rotary channels "
            f"(head_dim {self.head_dim} x partial_rotary_factor {self.partial_rotary_factor}) is {half}",
        )
        return self

    @model_validator(mode="after")
    def fit_experts(self) -> Self:
        """Experts, groups and choices."""
        layers, dense = self.num_hidden_layers, self.first_k_dense_replace
        require(dense <= layers, f"first_k_dense_replace = {dense} exceeds num_hidden_layers = {layers}")
        require_multiple(self, "n_routed_experts", "n_group")
        require(self.topk_group <= self.n_group, f"topk_group = {self.topk_group} exceeds n_group = {self.n_group}")
        per_group = self.n_routed_experts // self.n_group
        require(
            self.n_group == 1 or per_group >= 2,
            f"n_group = {self.n_group} leaves {per_group} expert a group; a group is scored by its best two",
        )
        available = per_group * self.topk_group
        require(
            self.num_experts_per_tok <= available,
            f"num_experts_per_tok = {self.num_experts_per_tok} exceeds the {available} experts to choose from "
            f"(n_routed_experts {self.n_routed_experts}, n_group {self.n_group}, topk_group {self.topk_group})",
        )
        if self.num_experts_per_tok == 1 and self.norm_topk_prob:
            logger.warning("norm_topk_prob with one expert per token: its weight is always 1, the router never learns")
        return self


class VisionConfig(Section):
    """The vision tower (field names and defaults are transformers', `Glm4vMoeVisionConfig`)."""

    depth: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    out_hidden_size: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    in_channels: int = Field(default=3, gt=0)
    image_size: int = Field(default=336, gt=0)
    patch_size: int = Field(default=14, gt=0)
    temporal_patch_size: int = Field(default=2, gt=0)
    spatial_merge_size: int = Field(default=2, gt=0)
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)

    @classmethod
    def only(cls) -> dict[str, tuple[object, ...]]:
        """The tower has no attention bias; dropout is not built."""
        return {
            "model_type": ("glm4v_moe", "glm4v_moe_vision"),
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "attention_dropout": (0,),
            "hidden_dropout_prob": (0,),
        }

    @model_validator(mode="before")
    @classmethod
    def read_both_spellings(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Rotary settings to the top level."""
        return flatten_rope(values)

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def pixels_per_patch(self) -> int:
        """Numbers in one row of pixel_values."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @model_validator(mode="after")
    def fit(self) -> Self:
        """Heads, axial RoPE (two axes, two halves) and the position table."""
        require_multiple(self, "hidden_size", "num_heads")
        require_multiple(self, "image_size", "patch_size")
        require(self.head_dim % 4 == 0, f"hidden_size / num_heads = {self.head_dim} is no multiple of 4 (axial RoPE)")
        return self


class ModelConfig(Section):
    """GLM-4.5V: text decoder, vision tower, and the ids of the tokens that stand for images."""

    text: TextConfig = Field(alias="text_config")
    vision: VisionConfig = Field(alias="vision_config")
    image_token_id: int = 151363
    video_token_id: int = 151364
    image_start_token_id: int = 151339
    image_end_token_id: int = 151340
    video_start_token_id: int = 151341
    video_end_token_id: int = 151342
    tie_word_embeddings: bool = False

    @classmethod
    def only(cls) -> dict[str, tuple[object, ...]]:
        """Quantised weights are not read."""
        return {"model_type": ("glm4v_moe",), "quantization_config": (None,)}

    @classmethod
    def refuse_unknown_keys(cls, values: Mapping[str, Any]) -> None:
        """The root holds no setting of the computation; files carry many things there."""

    @model_validator(mode="after")
    def fit(self) -> Self:
        """What text and vision must agree on."""
        require(
            not self.tie_word_embeddings,
            "tie_word_embeddings = True is not built: GLM-4.5V has its own lm_head. Untie the weights, set it false",
        )
        require(
            self.vision.out_hidden_size == self.text.hidden_size,
            f"vision_config.out_hidden_size = {self.vision.out_hidden_size} differs from "
            f"text_config.hidden_size = {self.text.hidden_size}",
        )
        require(
            self.image_token_id < self.text.vocab_size,
            f"image_token_id = {self.image_token_id} is outside text_config.vocab_size = {self.text.vocab_size}",
        )
        return self

    @classmethod
    def from_hf(cls, mapping: Mapping[str, Any], source: str = "config.json") -> "ModelConfig":
        """Read the content of a config.json.

        Args:
            mapping: the parsed file, hub or transformers 5 style.
            source: what to call the file in errors.
        Raises:
            ConfigError: one line per fault, each naming key and value.
        """
        values = dict(mapping)
        for key in ("text_config", "vision_config"):
            if not isinstance(values.get(key), Mapping):
                raise ConfigError(f"{source}: {key} is missing or no object. A GLM-4.5V config.json has both parts.")
        if values["text_config"].get("tie_word_embeddings"):  # where files before transformers 5 had it
            values["tie_word_embeddings"] = True
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError("\n".join(f"{source}: {line}" for line in describe(error))) from None

    @classmethod
    def from_hf_dir(cls, directory: str | Path) -> "ModelConfig":
        """Read `directory/config.json`.

        Raises:
            ConfigError: the file is missing, no JSON object, or describes no GLM-4.5V.
        """
        path = Path(directory) / "config.json"
        try:
            mapping = json.loads(path.read_bytes())
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"{path}: {reason}. Give the directory of a model in HF layout.") from None
        except ValueError as error:
            raise ConfigError(f"{path}: not valid JSON ({error}).") from None
        if not isinstance(mapping, dict):
            raise ConfigError(f"{path}: holds {type(mapping).__name__}, not a JSON object.")
        return cls.from_hf(mapping, str(path))


def describe(error: ValidationError) -> list[str]:
    """One line for each fault pydantic found: dotted key, value, reason."""
    lines = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "missing":
            lines.append(f"{key} is missing.")
        elif fault["type"] == "value_error":
            lines.append(f"{key}: {message}." if key else f"{message}.")
        else:
            lines.append(f"{key} = {fault['input']!r}: {message}.")
    return lines

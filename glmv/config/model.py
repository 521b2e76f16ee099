"""`model`: which model is trained, and which of its implementations."""

from typing import Literal

from pydantic import Field

from glmv.config.section import Section


class ModelSection(Section):
    """`model`: the architecture comes from the checkpoint's config.json, the choices of implementation from here."""

    model_id: Literal["glm4v_moe"] = "glm4v_moe"
    """Architecture; GLM-4.5V is the one that glmv knows."""
    model_name_or_path: str
    """Training checkpoint root or Hugging Face directory with config.json, which must be the checkpoint's own."""
    trust_remote_code: bool = False
    """Accepted because published configs carry it; glmv never runs code from a checkpoint."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "native-sparse"] = (
        "flash_attention_2"
    )
    """Attention kernel; `flash_attention_2` means the device's own fused kernel."""
    use_grouped_expert_matmul: bool = True
    """Multiply all experts in one grouped kernel where the device has one; false loops over them."""
    freeze: list[str] = Field(default_factory=list)
    """Module patterns whose parameters are not trained."""

"""GLM-4.5V as plain modules whose parameter names are the checkpoint's."""

from glmv.model.config import ConfigError, ModelConfig, TextConfig, VisionConfig
from glmv.model.glm4v_moe import Glm4vMoeForConditionalGeneration

__all__ = ["ConfigError", "Glm4vMoeForConditionalGeneration", "ModelConfig", "TextConfig", "VisionConfig"]

"""The training config: a YAML file, its schema, and what is said when they do not agree."""

from glmv.config.dtypes import torch_dtype
from glmv.config.errors import ConfigError
from glmv.config.load import load_config
from glmv.config.root import Config
from glmv.config.unbuilt import unbuilt

__all__ = ["Config", "ConfigError", "load_config", "torch_dtype", "unbuilt"]

"""glmv: GLM-4.5V training on FSDP2, and the framework that proves it right."""

__version__ = "0.1.0"

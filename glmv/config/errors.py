"""The one error of this package."""

from glmv.errors import GlmvError


class ConfigError(GlmvError):
    """A training config that cannot be read, or that says something it must not say."""

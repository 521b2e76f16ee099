"""The one error of this package."""

from glmv.errors import GlmvError


class DataError(GlmvError):
    """A data file, a picture or a tokenizer that cannot be trained on."""

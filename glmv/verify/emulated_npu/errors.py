"""What goes wrong with the emulated device itself, as against errors that the device raises."""

from glmv.errors import GlmvError


class EmulationError(GlmvError):
    """The emulated device cannot be built or installed here."""

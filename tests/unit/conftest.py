"""What every unit test may ask for."""

from pathlib import Path

import pytest

from glmv.tiny.make import make_tiny


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's Hugging Face directory. Read it; copy it before changing anything."""
    return make_tiny(tmp_path_factory.mktemp("hf") / "tiny")

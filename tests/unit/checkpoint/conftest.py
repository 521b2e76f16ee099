"""The tiny directory as a training checkpoint, and independent readers of both formats."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from glmv.checkpoint.hf_to_dcp import hf_to_dcp
from glmv.model import Glm4vMoeForConditionalGeneration, ModelConfig


@pytest.fixture(scope="session")
def hub_weights() -> Callable[[Path], dict[str, torch.Tensor]]:
    """`hub_weights(directory)`: every tensor, read by the safetensors library."""

    def read(directory: Path) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = {}
        for path in sorted(directory.glob("*.safetensors")):
            weights |= load_file(path)
        return weights

    return read


@pytest.fixture(scope="session")
def file_bytes() -> Callable[[Path], dict[str, bytes]]:
    """`file_bytes(directory)`: every visible file."""

    def read(directory: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file() and path.name[0] != "."}

    return read


@pytest.fixture(scope="session")
def root(tiny_dir, tmp_path_factory) -> Path:
    """Checkpoint root holding the tiny release. Read it; copy it before changing anything."""
    root = tmp_path_factory.mktemp("dcp") / "root"
    hf_to_dcp(tiny_dir, root)
    return root


@pytest.fixture
def root_copy(root, tmp_path) -> Path:
    return shutil.copytree(root, tmp_path / "root")


@pytest.fixture
def hf_copy(tiny_dir, tmp_path) -> Path:
    return shutil.copytree(tiny_dir, tmp_path / "hf")


@pytest.fixture(scope="session")
def new_model(tiny_dir) -> Callable[[], nn.Module]:
    """Make the tiny model, fp32, filled with a value that no weight has."""
    config = ModelConfig.from_hf_dir(tiny_dir)

    def make() -> nn.Module:
        with torch.device("meta"):
            model = Glm4vMoeForConditionalGeneration(config)
        model.to_empty(device="cpu")
        model.reset_buffers()
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.fill_(7e7)
        return model

    return make

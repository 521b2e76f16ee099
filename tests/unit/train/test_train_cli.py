from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from glmv.cli import app
from glmv.config import ConfigError

EXAMPLE = Path(__file__).parents[3] / "examples" / "pictures" / "train.yaml"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(key, raising=False)


def refusal(*overrides):
    """The error that the command stops with; it never gets as far as a process group."""
    result = CliRunner().invoke(app, ["train", str(EXAMPLE), *overrides])
    assert not dist.is_initialized()
    assert isinstance(result.exception, ConfigError)
    assert result.exception.exit_code == 2
    return str(result.exception)


def test_everything_unbuilt_is_refused_by_name_and_value():
    message = refusal("parallel.ulysses_parallel_size=2", "features.recompute=true")
    assert "parallel.ulysses_parallel_size = 2" in message
    assert "features.recompute = true" in message


def test_a_wrong_key_is_refused():
    assert "training.sede" in refusal("training.sede=1")

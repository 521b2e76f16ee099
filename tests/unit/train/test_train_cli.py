import subprocess
import sys
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
    message = refusal("parallel.tensor_parallel_size=2", "features.enable_activation_offload=true")
    assert "parallel.tensor_parallel_size = 2" in message
    assert "features.enable_activation_offload = true" in message


def test_a_wrong_key_is_refused():
    assert "training.sede" in refusal("training.sede=1")


def test_faults_of_a_file_are_told_at_once_and_without_a_traceback(tmp_path):
    text = EXAMPLE.read_text()
    for old, new in {
        "  seed: 1234": "  seeed: 1234",
        "  train_iters: 20": '  train_iters: "20"',
        "  lr: 1e-3": "  lr: 1e-5",  # a number, though YAML 1.1 reads a text
        "  lr_min: 1e-4": "  lr_min: 1e-6",
        "features:": "features:\n  enable_chunk_loss: true\n  enable_dynamic_chunk_loss: true",
        "parallel:": "parallel:\n  lr: 1",
    }.items():
        assert old in text
        text = text.replace(old, new, 1)
    (tmp_path / "x.yaml").write_text(text)
    command = [sys.executable, "-m", "glmv", "train", "x.yaml"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    said = [line.removeprefix("x.yaml: ") for line in ended.stderr.splitlines() if line.startswith("x.yaml: ")]
    assert [line.split()[0] for line in said] == [
        "parallel.lr",
        "features.enable_chunk_loss",
        "training.train_iters",
        "training.seeed",
    ]
    assert "Traceback" not in ended.stderr


def test_sizes_that_do_not_multiply_are_refused():
    said = refusal("parallel.data_parallel_size=4", "parallel.expert_parallel_size=3")
    assert "expert_parallel_size = 3 does not divide the number of ranks" in said
    assert " = 4 x 1 x 1 x 1 = 4 ranks" in said

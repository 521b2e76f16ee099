"""`glmv train` as users start it: exit codes, and a message printed once."""

import subprocess
import sys
from pathlib import Path

import pytest

from glmv.checkpoint.hf_to_dcp import hf_to_dcp

pytestmark = pytest.mark.multirank
EXAMPLE = Path(__file__).parents[2] / "examples" / "pictures" / "train.yaml"


@pytest.fixture(scope="module")
def overrides(tiny_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("dcp") / "tiny"
    hf_to_dcp(tiny_dir, root)
    return [
        f"training.load={root}",
        f"model.model_name_or_path={root}",
        f"data.dataset_param.preprocess_parameters.model_name_or_path={tiny_dir}",
        "data.dataset_param.basic_parameters.max_samples=4",
        "training.train_iters=1",
    ]


def test_a_users_error_is_printed_by_one_rank_and_ends_all_with_its_code(ranks):
    ended = ranks("-m", "glmv", "train", EXAMPLE, "training.sede=1", nproc=2)
    assert [rank.exit_code for rank in ended.ranks] == [2, 2], ended.describe()
    assert "training.sede" in ended.ranks[0].stderr
    assert "Traceback" not in ended.ranks[0].stderr
    assert ended.ranks[1].stderr == ""


def test_torchrun_trains(overrides, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "glmv", "train", str(EXAMPLE), *overrides, f"training.save={tmp_path}/out"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("| grad norm:") == 1
    assert (tmp_path / "out" / "iter_0000001").is_dir()

"""The published 106B config trains: all its features, on a small model and four ranks."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from glmv.checkpoint.hf_to_dcp import hf_to_dcp
from glmv.train.metrics import METRICS_FILE
from glmv.verify.owner import Layout
from glmv.verify.steps import Recipe, judge_run
from glmv.verify.trace import Trace
from spec.config import Config
from spec.optimizer import Hyper, Schedule

pytestmark = pytest.mark.multirank
ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "examples" / "glm4.5v" / "glm4_5v_106B_config_v1.yaml"
STEPS = 2


@pytest.fixture(scope="module")
def out(ranks, tiny_dir, tmp_path_factory):
    """What a recorded run of the config left, with files, sizes and steps that fit this machine."""
    out = tmp_path_factory.mktemp("published")
    hf_to_dcp(tiny_dir, out / "dcp")
    edited = [
        f"data.dataset_param.preprocess_parameters.model_name_or_path={tiny_dir}",
        "data.dataset_param.preprocess_parameters.image_max_pixels=18816",
        f"data.dataset_param.basic_parameters.dataset={ROOT / 'examples' / 'pictures' / 'conversations.json'}",
        "data.dataset_param.basic_parameters.dataset_dir=package:skimage/data",
        f"model.model_name_or_path={out / 'dcp'}",
        f"training.load={out / 'dcp'}",
        f"training.save={out / 'saved'}",
        f"training.train_iters={STEPS}",
        "parallel.expert_parallel_size=4",
        # Chunks of the published size hold whole sequences of the small model: smaller, so that there are several.
        "features.chunkloss_plan.chunk_size=16",
    ]
    command = ["-m", "glmv.verify.candidate", out / "trace", "fp32", PUBLISHED, *edited]
    ended = ranks(*command, nproc=4)
    assert ended.ok, ended.describe()
    return out


def test_it_reports_every_step_and_saves_the_last(out):
    lines = (out / "saved" / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert (out / "saved" / "iter_0000002").is_dir()


def test_every_step_is_the_laws(out, tiny_dir):
    recipe = Recipe(
        config=Config.from_hf(json.loads((tiny_dir / "config.json").read_text())),
        schedule=Schedule(lr=1e-5, train_iters=STEPS, lr_warmup_ratio=0.1, lr_decay_style="cosine"),
        hyper=Hyper(lr=1e-5),
        dtype=torch.bfloat16,
        layout=Layout(4, shards=4, ep=4, efsdp=1),
        loss_type="default",
    )
    with ThreadPoolExecutor(1) as pool:
        verdicts, mean = judge_run(Trace(out / "trace"), recipe, pool, lambda: None)
    assert [str(finding) for verdict in verdicts for finding in verdict.missed] == []
    assert mean.used <= 1

"""`glmv verify` from end to end on two ranks: every part of it is the real one."""

import json
import re
import shutil

import pytest
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file

from glmv.config import load_config
from glmv.errors import GlmvError
from glmv.verify.report import write_report
from glmv.verify.run import PICTURES, Options, _overrides, _recipe, prepare, verify
from glmv.verify.steps import KINDS, RunNoise, judge_step
from glmv.verify.steps import prepare as prepare_step
from glmv.verify.summary import summary, write_json
from glmv.verify.trace import Trace

pytestmark = pytest.mark.multirank


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("verify") / "report"
    return verify(Options(out=out, world_size=2, steps=2, policies=("bf16",)), Console(quiet=True))


def test_a_healthy_run_passes_and_everything_was_judged(result):
    assert result.missed == []
    for policy in result.policies:
        assert [verdict.step for verdict in policy.steps] == [1, 2]
        assert all(verdict.findings[kind] for verdict in policy.steps for kind in KINDS)
        assert len(policy.start) == len(policy.export) == 142
        assert policy.hf_logits


def test_it_is_told_to_people_and_to_programs(result):
    out = result.options.out
    write_json(result, out / "verify.json")
    assert json.loads((out / "verify.json").read_text())["passed"] is True
    page = write_report(result, out).read_text()
    assert page.count("<svg") == 3
    assert not re.search(r"""(src|href)=["']?http|url\(http|@import""", page)
    assert summary(result, out / "index.html").splitlines()[-1].startswith("PASS in ")


def test_a_gradient_that_the_run_left_out_is_a_miss(result, tmp_path):
    out = result.options.out
    shutil.copytree(out / "bf16" / "trace", tmp_path / "trace")
    for path in (tmp_path / "trace").glob("grads_0001_rank*.safetensors"):
        with safe_open(path, "pt") as file:
            places = json.loads(file.metadata()["places"])
            kept = {name: file.get_tensor(name) for name in places if name != "lm_head.weight"}
        places.pop("lm_head.weight")
        save_file(kept, path, metadata={"places": json.dumps(places)})
    config = load_config(PICTURES / "train.yaml", _overrides("bf16", result.options))
    trace, recipe, noise = Trace(tmp_path / "trace"), _recipe(config, out / "hf", "bf16", result.options), RunNoise()
    prepared = prepare_step(trace, recipe, 1, 1)
    noise.gradients, noise.loss = prepared.noise, prepared.loss_noise
    noise.routing.add(prepared.score_noise[0][0])
    gradients = judge_step(trace, recipe, prepared, noise).findings["gradients"]
    assert "lm_head.weight" in {finding.name for finding in gradients if finding.used > 1}


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(GlmvError, match="is not empty"):
        prepare(tmp_path)
    assert (tmp_path / "thesis.txt").exists()

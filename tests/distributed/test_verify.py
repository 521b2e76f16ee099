"""`glmv verify` from end to end on two ranks: every part of it is the real one."""

import json
import re

import pytest
from rich.console import Console

from glmv.errors import GlmvError
from glmv.verify.report import write_report
from glmv.verify.run import Options, prepare, verify
from glmv.verify.steps import KINDS
from glmv.verify.summary import summary, write_json

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


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(GlmvError, match="is not empty"):
        prepare(tmp_path)
    assert (tmp_path / "thesis.txt").exists()

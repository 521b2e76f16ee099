"""`glmv doctor` names what is there, what is not, and why; whatever it finds, it does not die of it."""

import json
import sys

import pytest
from broken_torch_npu import SAID, install_broken, run_python

from glmv import npu_package
from glmv.doctor import ascend, hardware, run, software, tiers
from glmv.doctor.fact import Fact, State, collect


@pytest.fixture(scope="module")
def broken_report(tmp_path_factory):
    """The doctor's findings where a broken torch_npu is installed, by name."""
    site = tmp_path_factory.mktemp("site")
    install_broken(site)
    done = run_python("-m", "glmv", "doctor", "--json", site=site)
    assert done.returncode == 0, done.stderr
    return {fact["name"]: fact for fact in json.loads(done.stdout)}


@pytest.fixture
def npus(monkeypatch):
    """Sets what the probe of the NPU found."""
    return lambda **found: monkeypatch.setattr(npu_package, "probe", lambda: npu_package.Probe(**found))


def test_a_broken_torch_npu_is_named_with_its_reason(broken_report):
    assert broken_report["torch_npu"]["state"] == "broken"
    assert SAID in broken_report["torch_npu"]["note"]
    assert "set_env.sh" in broken_report["torch_npu"]["note"]


def test_a_shell_in_which_torchrun_would_die_is_named(broken_report):
    assert broken_report["TORCH_DEVICE_BACKEND_AUTOLOAD"]["state"] == "broken"


def test_the_npu_tier_names_why_it_is_emulated(broken_report):
    assert SAID in broken_report["pytest -m npu"]["note"]


def test_the_cpu_is_not_called_sick_for_it(broken_report):
    assert [broken_report[name]["state"] for name in ("torch", "transformers", "tests/unit", "gloo")] == ["ok"] * 4


def test_every_part_is_examined_here():
    assert {fact.part for fact in run.examine()} == {"software", "ascend", "hardware", "kernels", "tests"}


def test_nothing_here_makes_a_collector_fail():
    names = {collector.__name__ for _, collectors in run.COLLECTORS for collector in collectors}
    failed = [fact for fact in run.examine() if fact.state is State.broken and fact.name in names]
    assert [fact for fact in failed if fact.name != "torch_npu"] == []


def test_a_collector_that_dies_is_a_finding_and_keeps_what_it_had():
    def ill():
        yield Fact("part", "one", "found")
        raise OSError("no such disk")

    assert collect("part", ill)[1:] == [Fact("part", "ill", "OSError: no such disk", State.broken)]


def test_a_package_that_cannot_be_imported_is_fatal(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.models.glm4v_moe", None)
    assert [fact.state for fact in software.transformers()] == [State.fatal]


def test_a_missing_compiler_ends_the_emulation_and_says_so(monkeypatch, npus):
    npus(reason="none here")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert next(fact.value for fact in software.compiler()) == "no no-such-compiler"
    assert tiers.npu_tier().value == "not"


def test_a_real_npu_is_preferred(npus):
    npus(reason=None, count=8, name="Ascend910B3")
    assert tiers.npu_tier().value == "npu (8 x Ascend910B3)"
    assert [fact.value for fact in hardware.npu()] == ["8 x Ascend910B3"]


def test_cann_is_read_where_the_environment_points(tmp_path):
    (tmp_path / "version.cfg").write_text("# comment\ntoolkit_running_version=[8.3.RC1:8.3.RC1]\n", encoding="utf-8")
    fact = ascend.cann_fact({"ASCEND_TOOLKIT_HOME": str(tmp_path)}, ())
    assert (fact.value, fact.state) == ("8.3.RC1", State.good)


def test_cann_that_was_not_sourced_is_named(tmp_path):
    fact = ascend.cann_fact({}, (tmp_path,))
    assert (fact.state, "not sourced" in fact.note) == (State.broken, True)


def test_an_environment_that_points_nowhere_is_named(tmp_path):
    fact = ascend.cann_fact({"ASCEND_HOME_PATH": str(tmp_path / "gone")}, (tmp_path,))
    assert (fact.state, "ASCEND_HOME_PATH" in fact.note) == (State.broken, True)


def test_a_probe_that_takes_its_process_down_is_a_reason(tmp_path):
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("import os; os.abort()\n", encoding="utf-8")
    done = run_python("-c", "import glmv.npu_package as n; print(n.probe().reason)", site=tmp_path)
    assert "ends its process with exit code -6" in done.stdout

"""Seeded faults go in where they belong and nowhere else; a dead one is red."""

import os
import subprocess
import sys

import pytest

from glmv.verify.faults.catalogue import FAULTS
from glmv.verify.faults.fault import ROOT, DeadFaultError, Fault
from glmv.verify.faults.run import Verdict

FAULT = Fault(
    "sum-differs", "glmv/x.py", "return a + b", "return a - b", "Sums are wrong.", ("tests/test_x.py::test_sum",)
)


def python(code, **environment):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment)


def test_one_line_is_replaced_and_keeps_its_indentation():
    assert FAULT.apply("def f(a, b):\n    return a + b\n") == "def f(a, b):\n    return a - b\n"


@pytest.mark.parametrize("source", ["return a * b\n", "return a + b\nreturn a + b\n"])
def test_a_line_that_is_gone_or_doubled_is_dead(source):
    with pytest.raises(DeadFaultError, match="sum-differs"):
        FAULT.apply(source)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_every_fault_has_its_line(fault):
    source = fault.path.read_text(encoding="utf-8")
    assert fault.apply(source) != source


@pytest.mark.parametrize("killer", sorted({killer for fault in FAULTS for killer in fault.killers}))
def test_every_killer_is_a_test(killer):
    path, _, name = killer.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8")


def test_ids_are_unique():
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)


def test_a_fault_is_refused_outside_of_tests():
    ended = python("import glmv", GLMV_FAULT=FAULTS[0].id, GLMV_FAULT_PARENT="1")
    assert ended.returncode == 1
    assert "is for test processes only" in ended.stderr


def test_a_fault_changes_the_imported_module():
    code = "import pytest, glmv.ops.loss, torch; print(glmv.ops.loss.shift(torch.tensor([[1, 2]])).tolist())"
    assert python(code).stdout == "[[2, -100]]\n"
    assert python(code, GLMV_FAULT="labels-unshifted").stdout == "[[1, 2]]\n"


def test_a_rank_that_a_test_started_has_the_fault_too():
    code = "import glmv.ops.loss, torch; print(glmv.ops.loss.shift(torch.tensor([[1, 2]])).tolist())"
    ended = python(code, GLMV_FAULT="labels-unshifted", GLMV_FAULT_PARENT=str(os.getpid()))
    assert ended.stdout == "[[1, 2]]\n"


def test_an_unknown_fault_is_told():
    assert "no such fault" in python("import pytest, glmv", GLMV_FAULT="nonsense").stderr


def test_a_dead_fault_is_not_good():
    assert not Verdict("sum-differs", {}, dead="its line stands 0 times").good

"""What counts as a test that saw a fault: one that the session said was red, and nothing else."""

import os
import subprocess
import sys

import pytest

from glmv.verify.faults.ends import GREEN, NO_RESULT, RED, SKIPPED, Ends
from glmv.verify.faults.fault import ROOT, Fault
from glmv.verify.faults.run import NOT_FOUND, Verdict, _verdict

KILLER = "test_of_all_ends.py::test_x"
FAULT = Fault("sum-differs", "glmv/x.py", "return a + b", "return a - b", "Sums are wrong.", (KILLER,))
SESSION = """
import json, sys, pytest
from glmv.verify.faults.ends import Teller
with open("said", "w") as file:
    tell = lambda said: print(json.dumps(said), file=file, flush=True)
    tell({"exit_code": int(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]], plugins=[Teller(tell)]))})
"""
TESTS = """
import os, pytest
def test_green(): assert True
def test_red(): assert False, "first wrong: gradient of lm_head.weight: used 3 of 1"
@pytest.mark.skip(reason="not today")
def test_skipped_before(): assert False
def test_skipped_within(): pytest.skip("not today")
@pytest.fixture
def broken(): raise KeyError
def test_setup_fails(broken): assert True
@pytest.fixture
def left(): yield; raise KeyError
def test_teardown_fails(left): assert True
@pytest.mark.parametrize("n", [0, 1])
def test_one_case_red(n): assert n
def test_deselected(): assert False
def test_dies(): os._exit(0)
def test_after_the_end(): assert False
"""


def run(directory, source, *arguments):
    """How a session on `source` ended, as its lines say."""
    (directory / "test_of_all_ends.py").write_text(source)
    command = [sys.executable, "-c", SESSION, *(arguments or ("test_of_all_ends.py",))]
    subprocess.run(command, cwd=directory, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, check=False)
    return Ends.read((directory / "said").read_text().splitlines(keepends=True))


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    return run(tmp_path_factory.mktemp("ends"), TESTS, "test_of_all_ends.py", "-k", "not deselected")


@pytest.mark.parametrize(
    ("test", "end"),
    {
        "green": GREEN,
        "red": RED,
        "skipped_before": SKIPPED,
        "skipped_within": SKIPPED,
        "setup_fails": RED,
        "teardown_fails": RED,
        "one_case_red": RED,
        "one_case_red[1]": GREEN,
        "deselected": NO_RESULT,
        "dies": RED,
        "after_the_end": NO_RESULT,
    }.items(),
)
def test_a_killer_ends_as_the_session_says(test, end, ends):
    assert ends.of(f"test_of_all_ends.py::test_{test}") == end


def test_what_the_grid_calls_wrong_first_is_told(ends):
    assert set(ends.first_wrong) == {"gradient of lm_head.weight"}


def test_a_file_that_cannot_be_imported_is_red(tmp_path):
    ends = run(tmp_path, "import nothing_of_this_name", KILLER)
    assert ends.exit_code == NOT_FOUND
    assert _verdict(FAULT, ends).outcomes == {KILLER: RED}


def test_a_killer_that_does_not_exist_makes_its_fault_dead(tmp_path):
    verdict = _verdict(FAULT, run(tmp_path, TESTS, KILLER))
    assert verdict.dead == f"one of its killers does not exist: {KILLER}"
    assert not verdict.good


def test_a_session_that_died_before_its_first_test_proves_nothing():
    assert _verdict(FAULT, Ends.read([])).outcomes == {KILLER: NO_RESULT}


@pytest.mark.parametrize("end", [GREEN, SKIPPED, NO_RESULT])
def test_a_verdict_is_good_only_if_every_killer_is_red(end):
    assert Verdict("sum-differs", {"a": RED, "b": RED}).good
    assert not Verdict("sum-differs", {"a": RED, "b": end}).good

"""Under torchrun every rank is a session: they agree on all, or all end."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.multirank
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def torchrun(sessions, what, *arguments, file="launched.py"):
    return sessions.run(file, *arguments, launcher=TORCHRUN, WHAT=what)


def test_a_green_session_is_told_by_rank_0_alone(sessions):
    session = torchrun(sessions, "nothing")
    assert session.exit_code == 0
    assert session.printed.count("4 passed") == 1
    assert "1 tests are for other numbers of ranks" in session.printed
    assert [case.outcome for case in session.cases.values()] == ["passed"] * 4


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("killed", "rank 1 died in the call of tests/unit/testing/sessions/launched.py::test_the_bad_one"),
        ("sleeps", "rank 1 was not done in time: it stood in test_the_bad_one"),
        ("polls", "rank 1 was not done in time: it stood in test_the_bad_one"),
        ("fails", "rank 1: AssertionError: only rank 0 is right"),
    ],
)
def test_a_rank_gone_astray_is_red_and_ends_the_session(what, said, sessions):
    session = torchrun(sessions, what)
    assert session.exit_code == 1
    assert said in session.cases["test_the_bad_one"].said
    assert "FAILED tests/unit/testing/sessions/launched.py::test_the_bad_one - rank 1" in session.printed
    assert "test_afterwards" not in session.cases


def test_ranks_that_collect_differently_do_not_begin(sessions):
    session = torchrun(sessions, "other cases")
    assert session.exit_code == 1
    assert "rank 1 collected other tests than rank 0; it has in addition" in session.printed
    assert session.cases == {}


def test_ranks_draw_the_same_examples(sessions):
    session = torchrun(sessions, "nothing", "-k", "draw_the_same or right_afterwards or cases", file="drawn.py")
    assert session.exit_code == 0, session.printed
    assert [case.outcome for case in session.cases.values()] == ["passed"] * 4


def test_an_example_that_fails_on_one_rank_is_told_by_that_rank(sessions):
    session = torchrun(sessions, "nothing", "-k", "fails_on_one_rank", file="drawn.py")
    assert "rank 1: " in session.cases["test_fails_on_one_rank"].said
    assert "\n    size=" in session.cases["test_fails_on_one_rank"].said


def test_xdist_is_refused():
    command = [sys.executable, "-m", "pytest", "-n", "2", "tests/unit/testing/test_torchrun.py", "--collect-only"]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "RANK": "0", "WORLD_SIZE": "2"})
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "pytest-xdist (-n, --dist) and torchrun exclude each other" in ended.stderr


def test_a_port_that_no_rank_is_told_is_refused():
    command = [sys.executable, "-m", "pytest", "tests/unit/testing/test_torchrun.py", "--collect-only"]
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | launched, timeout=100)
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "Use torchrun --standalone" in ended.stderr

"""Sessions with ranks: side by side, with xdist, killed; and what each leaves behind."""

import os
import signal

import pytest
from processes import PATIENCE_S, eventually, is_running

from glmv.verify.testing.template import ADDRESS

pytestmark = pytest.mark.multirank


def ranks_of(directory):
    return [int(path.name) for path in directory.iterdir() if path.name.isdigit()]


def test_ranks_of_several_numbers_serve_one_session(sessions):
    session = sessions.run("green.py")
    outcomes = {name: case.outcome for name, case in session.cases.items()}
    assert outcomes.pop("test_for_ever") == "skipped"
    assert set(outcomes.values()) == {"passed"}
    assert len(outcomes) == 9


def test_two_sessions_at_once_do_not_meet(sessions):
    both = [sessions.start("green.py", "-q") for _ in range(2)]
    printed = [sessions.wait(process) for process in both]
    assert [process.returncode for process in both] == [0, 0], printed


def test_workers_of_xdist_have_ranks_too(sessions):
    session = sessions.run("green.py", "-n", "2")
    assert session.exit_code == 0, session.printed
    assert sum(case.outcome == "passed" for case in session.cases.values()) == 9


def test_a_session_without_a_template_starts_and_ends_its_own(sessions, tmp_path):
    session = sessions.run("green.py", "-k", "directories and not fixtures", PIDS=str(tmp_path), **{ADDRESS: ""})
    assert session.exit_code == 0
    assert len(ranks_of(tmp_path)) == 2
    assert eventually(lambda: not any(map(is_running, ranks_of(tmp_path))))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_ranks_end_with_their_session_however_that_ends(number, sessions, tmp_path):
    process = sessions.start("green.py", "-k", "for_ever", PIDS=str(tmp_path), FOR_EVER="1")
    assert eventually(lambda: len(list(tmp_path.glob("waiting-*"))) == 2)
    os.kill(process.pid, number)
    process.communicate(timeout=PATIENCE_S)
    assert len(ranks_of(tmp_path)) == 2
    assert eventually(lambda: not any(map(is_running, ranks_of(tmp_path))))


def test_a_selected_case_runs_alone(sessions):
    session = sessions.run("green.py::test_of_two[2]")
    assert {name: case.outcome for name, case in session.cases.items()} == {"test_of_two[2]": "passed"}


def test_what_ranks_print_is_shown_on_demand(sessions):
    session = sessions.run("red.py", "-k", "exits and not right", "-s")
    assert "Captured stdout of rank 0\nlast words" in session.printed


def test_a_marker_without_a_number_is_told(sessions, tmp_path):
    (tmp_path / "test_x.py").write_text("import pytest\n@pytest.mark.world_size\ndef test_x(): pass\n")
    session = sessions.run(str(tmp_path / "test_x.py"), "-p", "glmv.verify.testing.plugin")
    assert session.exit_code == pytest.ExitCode.USAGE_ERROR
    assert "the marker is world_size(n) with a number of ranks" in session.printed

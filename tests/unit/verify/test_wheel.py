"""`make conformance` around the comparisons themselves: what it needs, what it says without, when it is red."""

import subprocess
import sys

import pytest
import torch

from glmv.verify.wheel import __main__ as conformance
from glmv.verify.wheel import install as installing
from glmv.verify.wheel.install import WheelUnavailable, install
from glmv.verify.wheel.once import made_once
from glmv.verify.wheel.recording import RecordedCall, RecordingError, read_recording, write_recording
from glmv.verify.wheel.session import Report, Session
from glmv.verify.wheel.stand_ins import StandInError, build


@pytest.fixture
def no_index(monkeypatch):
    """pip finds nothing, as on a machine without a network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


@pytest.fixture
def session(tmp_path):
    return Session(tmp_path / "site", tmp_path / "recording.json", tmp_path / "report.json")


def test_without_the_wheel_it_says_that_nothing_was_checked(monkeypatch, capsys, tmp_path):
    def unavailable():
        raise WheelUnavailable("no network")

    monkeypatch.setattr(conformance, "install", unavailable)
    monkeypatch.setattr(conformance, "missing_tools", list)
    assert conformance.main() == 0
    assert "SKIPPED, nothing was checked: no network" in capsys.readouterr().out


def test_without_a_compiler_it_says_that_nothing_was_checked(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert conformance.main() == 0
    assert "SKIPPED, nothing was checked: gcc, nm, readelf not found" in capsys.readouterr().out


def test_pips_own_words_are_the_reason(no_index, tmp_path):
    with pytest.raises(WheelUnavailable, match=r"torch_npu==2\.13\.0 cannot be installed: ERROR: No matching"):
        install("2.13.0", tmp_path)
    assert installing.installed_site("2.13.0", tmp_path) is None


def test_stand_ins_need_their_tools(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StandInError, match="install gcc and binutils"):
        build(tmp_path)


@pytest.mark.parametrize(
    ("code", "cases", "replayed", "mismatches", "expected"),
    [
        (0, 2000, 1, [], 0),
        (1, 2000, 1, [], 1),
        (0, 1999, 1, [], 1),
        (0, 2000, 0, [], 1),
        (0, 2000, 1, ["one"], 1),
    ],
)
def test_when_it_is_red(session, code, cases, replayed, mismatches, expected):
    replays = {"npu_swiglu": replayed} if replayed else {}
    Report("2.13.0", meta_cases={"a": cases}, replayed_calls=replays, mismatches=mismatches).write(session.report)
    assert conformance.summed_up(code, session, 1.0) == expected


def test_it_is_red_when_nothing_was_reported(session, capsys):
    assert conformance.summed_up(0, session, 1.0) == 1
    assert "FAILED before anything was compared" in capsys.readouterr().out


def test_a_child_knows_its_session(session):
    assert Session.of(session.environment()) == session
    assert Session.of({}) is None


def test_a_directory_that_was_not_finished_is_not_there(tmp_path):
    def fail():
        with made_once(tmp_path / "made") as unfinished:
            (unfinished / "half").touch()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not (tmp_path / "made").exists()
    with made_once(tmp_path / "made") as unfinished:
        assert list(unfinished.iterdir()) == []
    assert (tmp_path / "made").is_dir()


def test_a_recording_comes_back_without_values(tmp_path):
    rows = torch.ones(4, 6, dtype=torch.bfloat16).t()
    write_recording([RecordedCall("npu_x", ([rows], 3, None, torch.int32), {"mode": "half"})], tmp_path / "r.json")
    (call,) = read_recording(tmp_path / "r.json")
    assert (call.op, call.args[1:], call.kwargs) == ("npu_x", (3, None, torch.int32), {"mode": "half"})
    back = call.args[0][0]
    assert (back.shape, back.stride(), back.dtype, back.device.type) == ((6, 4), (1, 6), torch.bfloat16, "meta")


@pytest.mark.parametrize("text", ["", "{}", '[{"op": "a"}]', '[["op"]]'])
def test_another_file_is_no_recording(tmp_path, text):
    (tmp_path / "r.json").write_text(text, encoding="utf-8")
    with pytest.raises(RecordingError, match="not a recording"):
        read_recording(tmp_path / "r.json")


def test_replay_of_another_file_is_refused_without_a_traceback(tmp_path):
    command = [sys.executable, "-m", "glmv.verify.wheel.replay", str(tmp_path / "gone.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "gone.json is not a recording" in done.stderr

"""Tests of the NPU say what they ran on, and leave the session's own process as it is."""

import pytest

from glmv.verify.testing import npu
from glmv.verify.testing.npu import Npu, choose_npu

pytestmark = pytest.mark.multirank
EMULATED = "npu: EMULATED (contract operators on host memory)"


@pytest.fixture(scope="module")
def without_hardware():
    if not choose_npu("auto").emulated:
        pytest.skip("this machine has an NPU")


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_the_emulated_npu_serves_its_tests_and_is_announced(workers, sessions, without_hardware):
    session = sessions.run("on_npu.py", "--npu", "emulated", *workers)
    assert [case.outcome for case in session.cases.values()] == ["passed"] * 3, session.printed
    assert EMULATED in session.printed
    assert session.properties == {"npu": "EMULATED (contract operators on host memory)"}


def test_the_npu_is_named_before_the_first_test_and_behind_the_last(sessions, without_hardware):
    header, _, summary = sessions.run("on_npu.py", "--npu", "emulated").printed.partition("on_npu.py ")
    assert EMULATED in header
    assert EMULATED in summary


def test_nothing_is_said_of_an_npu_that_no_test_asks_for(sessions):
    session = sessions.run("on_npu.py", "-k", "none")
    assert "npu:" not in session.printed
    assert session.properties == {}


@pytest.mark.parametrize("option", ["--npu=real", "--device=npu"])
def test_hardware_that_is_not_there_is_refused(option, sessions, without_hardware):
    session = sessions.run("on_npu.py", option)
    assert session.exit_code == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: {option.replace('=', ' ')}: " in session.printed
    assert "Traceback" not in session.printed


def test_auto_takes_the_hardware_that_is_there(monkeypatch):
    monkeypatch.setattr(npu, "_real_npu", lambda: Npu("8 x Ascend910B"))
    assert str(choose_npu("auto")) == str(choose_npu("real")) == "npu: 8 x Ascend910B"
    assert choose_npu("emulated").emulated

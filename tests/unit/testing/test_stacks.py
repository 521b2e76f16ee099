"""What a rank does is seen at each look at it, and not worked out from a clock."""

import subprocess
from types import SimpleNamespace

import psutil
import pytest
from processes import eventually

from glmv.verify.testing import stacks
from glmv.verify.testing.stacks import LOOK_S, Stalemate, dump, processor_ticks

HALF = """Thread 0x1 (most recent call first):
  File "a.py", line 1 in wait

Current thread 0x2 (most recent call first):
"""
WHOLE = f"""{HALF}  File "a.py", line 2 in barrier
  File "server.py", line 3 in <module>
"""


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "3600"])
    yield process
    process.kill()
    process.wait()


def test_a_sleeping_process_is_idle(sleeper):
    stalemate = Stalemate()
    assert eventually(lambda: stalemate.idle_s([sleeper.pid]) > LOOK_S)


@pytest.mark.parametrize(("busy", "idle_s"), [(False, [0, 0.25, 0.25 + LOOK_S]), (True, [0, 0, 0])])
def test_time_in_which_nobody_looked_does_not_count(busy, idle_s, monkeypatch):
    """The machine may have stood still, ranks and all."""
    clock = iter([0, 0, 0.25, 1000])
    monkeypatch.setattr(stacks, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(stacks, "processor_ticks", lambda pid, without: (7, busy))
    stalemate = Stalemate()
    assert [stalemate.idle_s([1]) for _ in range(3)] == idle_s


def test_a_process_whose_end_is_not_told_yet_is_busy(sleeper):
    sleeper.kill()
    assert eventually(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_ZOMBIE)
    assert processor_ticks(sleeper.pid)[1]


def test_a_process_that_is_gone_is_idle(sleeper):
    sleeper.kill()
    sleeper.wait()
    assert processor_ticks(sleeper.pid) == (0, False)


def test_a_dump_is_read_when_it_is_whole(tmp_path, monkeypatch):
    seen = iter(["", HALF, HALF, HALF, WHOLE])
    monkeypatch.setattr(stacks, "_read", lambda files, before: [next(seen)])
    assert dump([], [tmp_path / "stacks"]) == [WHOLE]

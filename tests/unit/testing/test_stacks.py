"""What a rank does is seen at each look at it, and not worked out from a clock."""

import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from processes import eventually

from glmv.verify.testing import stacks
from glmv.verify.testing.stacks import LOOK_S, Look, Stalemate, dump, look

HALF = """Thread 0x1 (most recent call first):
  File "a.py", line 1 in wait

Current thread 0x2 (most recent call first):
"""
WHOLE = f"""{HALF}  File "a.py", line 2 in barrier
  File "server.py", line 3 in <module>
"""


@pytest.fixture
def start():
    """`start(*command)`: a process that ends with the test."""
    started = []
    yield lambda *command: started.append(subprocess.Popen(command)) or started[-1]
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def sleeper(start):
    return start("sleep", "3600")


def test_a_sleeping_process_is_idle(sleeper):
    stalemate = Stalemate()
    assert eventually(lambda: stalemate.idle_s([sleeper.pid]) > LOOK_S)


def idle_s(monkeypatch, looks, times):
    """For how long a process counts as idle at each of these looks."""
    looks, clock = iter(looks), iter([0, *times])
    monkeypatch.setattr(stacks, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(stacks, "look", lambda pid, without: next(looks))
    stalemate = Stalemate()
    return [stalemate.idle_s([1]) for _ in times]


def test_time_in_which_nobody_looked_does_not_count(monkeypatch):
    """The machine may have stood still, ranks and all."""
    assert idle_s(monkeypatch, [Look(7)] * 3, [0, 0.25, 1000]) == [0, 0.25, 0.25 + LOOK_S]


@pytest.mark.parametrize("busy", [Look(8), Look(7, held=True)], ids=["computes", "held"])
def test_who_does_something_is_idle_no_more(busy, monkeypatch):
    assert idle_s(monkeypatch, [Look(7), Look(7), busy, busy], [0, 0.25, 0.5, 0.75])[:3] == [0, 0.25, 0]


def test_a_thread_that_waits_for_a_processor_is_not_idle(monkeypatch):
    waits = Look(7, ready={"1": 40})
    assert idle_s(monkeypatch, [Look(7), waits, waits, Look(7)], [0, 0.25, 0.5, 0.75]) == [0, 0, 0, 0.25]


def test_a_thread_that_sleeps_between_looks_only_looks_for_news(monkeypatch):
    looks = [Look(7), Look(7, ready={"1": 40}), Look(7, ready={"1": 65}), Look(7)]
    assert idle_s(monkeypatch, looks, [0, 0.25, 0.5, 0.75]) == [0, 0, 0, 0.75]


def test_a_thread_that_computes_is_ready(start):
    process = start(sys.executable, "-c", "while True: pass")
    assert eventually(lambda: str(process.pid) in look(process.pid).ready)


def test_a_process_whose_end_is_not_told_yet_is_held(sleeper):
    sleeper.kill()
    assert eventually(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_ZOMBIE)
    assert look(sleeper.pid).held


def test_a_process_that_is_gone_is_idle(sleeper):
    sleeper.kill()
    sleeper.wait()
    assert look(sleeper.pid) == Look()


def test_a_dump_is_read_when_it_is_whole(tmp_path, monkeypatch):
    seen = iter(["", HALF, HALF, HALF, WHOLE])
    monkeypatch.setattr(stacks, "_read", lambda files, before: [next(seen)])
    assert dump([], [tmp_path / "stacks"]) == [WHOLE]

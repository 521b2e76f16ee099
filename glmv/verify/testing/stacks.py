"""Where a rank is, read from outside: its Python stacks, and whether it does anything at all."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
RUNNER = ("/_pytest/", "/pluggy/", "/glmv/verify/testing/")
WAITS = ("/torch/distributed/", "/glmv/verify/testing/board")
# The last line of a whole dump: the outermost frame of the main thread, or the mark of a stack that is cut short.
END = re.compile(r"^  (File .* in <module>|\.\.\.)\n\Z", re.MULTILINE)
# Printing takes milliseconds of processor time, for which a rank may have to wait.
DUMP_S = 10.0
# A longer time between two looks is one in which this process, or the machine, stood still: it says nothing of others.
LOOK_S = 0.5


def dump(pids: Sequence[int], files: Sequence[Path]) -> list[str]:
    """The Python stacks of running ranks, which have faulthandler on SIGUSR1; "" of one that could not say."""
    before = [file.stat().st_size if file.exists() else 0 for file in files]
    for pid in pids:
        try:
            os.kill(pid, signal.SIGUSR1)
        except ProcessLookupError:
            continue
    deadline = time.monotonic() + DUMP_S
    texts = _read(files, before)
    while time.monotonic() < deadline and not all(map(END.search, texts)):
        time.sleep(0.02)
        texts = _read(files, before)
    return texts


def _read(files: Sequence[Path], before: Sequence[int]) -> list[str]:
    texts = []
    for file, start in zip(files, before, strict=True):
        with open(file, "rb") as stacks:
            stacks.seek(start)
            texts.append(stacks.read().decode(errors="replace"))
    return texts


def main_thread(stack: str) -> list[re.Match[str]]:
    """Frames of the thread that runs tests, innermost first."""
    for thread in re.split(r"\n(?=Thread |Current thread )", stack):
        frames = list(FRAME.finditer(thread))
        if any(frame["function"] == "pytest_runtestloop" for frame in frames):
            return frames
    return []


def shortened(stack: str) -> str:
    """Without the frames of pytest, which are the same in every test."""
    lines: list[str] = []
    cut = False
    for line in stack.splitlines():
        cut = line.startswith("  File") and (cut or any(name in line for name in RUNNER))
        if not cut:
            lines.append(line)
    return "\n".join(lines)


def waits_in(stack: str) -> str:
    """The collective that a rank waits in, as "all_reduce, called in test_x.py:12"; "" if in none."""
    frames = main_thread(stack)
    inside = []
    for frame in frames:
        if not any(name in frame["file"] for name in WAITS):
            break
        inside.append(frame)
    if not inside:
        return ""
    names = [frame["function"] for frame in inside if frame["function"] != "wrapper"]
    place = frames[len(inside)] if len(inside) < len(frames) else None
    called = f", called in {Path(place['file']).name}:{place['line']} ({place['function']})" if place else ""
    return f"{names[-1] if names else 'a collective'}{called}"


def stands_in(stack: str) -> str:
    """The innermost place of the thread that runs tests."""
    frames = main_thread(stack)
    return f"{frames[0]['function']} ({frames[0]['file']}:{frames[0]['line']})" if frames else "an unknown place"


@dataclass(frozen=True)
class Look:
    """What the threads of a process were seen to do at one moment.

    Attributes:
        ticks: processor time used so far.
        held: one waits for a disk (or for memory that is swapped out), or the process has ended and will be told of.
        ready: of the threads that run or want to, how often each has gone to sleep so far, by thread.
    """

    ticks: int = 0
    held: bool = False
    ready: dict[str, int] = field(default_factory=dict)


def look(pid: int, without: int | None = None) -> Look:
    """Look at a process; one that is gone does nothing.

    Args:
        without: a thread that does not count.
    """
    ticks, held, ready = 0, False, {}
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return Look()
    for thread in threads:
        if thread == str(without):
            continue
        try:
            fields = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
            if fields[0] == "R":
                ready[thread] = _sleeps(Path(f"/proc/{pid}/task/{thread}/status").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
        held = held or fields[0] in "DZ"
        ticks += int(fields[11]) + int(fields[12])
    return Look(ticks, held, ready)


def _sleeps(status: str) -> int:
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


class Stalemate:
    """Sees that ranks wait for each other in collectives that will never come to an end.

    The sign: for some seconds no rank has used the processor or wanted to, and the stacks of all stand in collectives.
    Ranks that wait for one which computes, sleeps or waits for a child process are none. Neither are ranks on a machine
    that is too busy for them, or that stood still itself: what counts are the looks at which all were seen idle. A
    thread that is ready at two looks and has not slept in between waits for a processor; one that has slept only looks
    for news, as gloo's does a hundred times a second.
    """

    def __init__(self) -> None:
        self._ticks: list[int] = []
        self._ready: dict[str, int] = {}
        self._idle_s = 0.0
        self._looked = time.monotonic()

    def idle_s(self, pids: Sequence[int], without: int | None = None) -> float:
        """For how many seconds none of these processes has been seen to do anything. Ask a few times a second.

        Returns:
            0 also while a thread is ready: it may be about to do something.
        """
        seen = [look(pid, without) for pid in pids]
        ticks, now = [one.ticks for one in seen], time.monotonic()
        ready = {thread: sleeps for one in seen for thread, sleeps in one.ready.items()}
        if ticks != self._ticks or ready.items() & self._ready.items() or any(one.held for one in seen):
            self._idle_s = 0.0
        else:
            self._idle_s += min(now - self._looked, LOOK_S)
        self._ticks, self._ready, self._looked = ticks, ready, now
        return 0.0 if ready else self._idle_s

    def restart(self) -> None:
        """Begin to count anew."""
        self._idle_s = 0.0

"""Where a rank is, read from outside: its Python stacks, and whether it does anything at all."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
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
# Runs or wants to, waits for a disk (or for memory that is swapped out), has ended and will be told of.
BUSY = "RDZ"


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


def processor_ticks(pid: int, without: int | None = None) -> tuple[int, bool]:
    """Processor time that the threads of a process have used, and whether one of them is `BUSY` right now.

    Args:
        without: a thread that does not count.
    """
    total, busy = 0, False
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return 0, False
    for thread in threads:
        if thread == str(without):
            continue
        try:
            fields = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        busy = busy or fields[0] in BUSY
        total += int(fields[11]) + int(fields[12])
    return total, busy


class Stalemate:
    """Sees that ranks wait for each other in collectives that will never come to an end.

    The sign: for some seconds no rank has used the processor or wanted to, and the stacks of all stand in collectives.
    Ranks that wait for one which computes, sleeps or waits for a child process are none. Neither are ranks on a machine
    that is too busy for them, or that stood still itself: what counts are the looks at which all were seen idle.
    """

    def __init__(self) -> None:
        self._ticks: list[int] = []
        self._idle_s = 0.0
        self._looked = time.monotonic()

    def idle_s(self, pids: Sequence[int], without: int | None = None) -> float:
        """For how many seconds none of these processes has been seen to do anything. Ask a few times a second."""
        seen = [processor_ticks(pid, without) for pid in pids]
        ticks, now = [used for used, _ in seen], time.monotonic()
        if ticks != self._ticks or any(busy for _, busy in seen):
            self._idle_s = 0.0
        else:
            self._idle_s += min(now - self._looked, LOOK_S)
        self._ticks, self._looked = ticks, now
        return self._idle_s

    def restart(self) -> None:
        """Begin to count anew."""
        self._idle_s = 0.0

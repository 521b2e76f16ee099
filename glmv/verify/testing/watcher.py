"""A thread beside the tests of a torchrun session, which ends all ranks when they can go on together no more.

The thread that runs tests may hang in a collective, and then not even a signal handler of Python's gets its turn. Each
rank's watcher says on the board how its rank is; that of rank 0 judges, reports and writes the JUnit file.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from glmv.verify.testing.merge import Told
from glmv.verify.testing.pool import GRACE_S, IDLE_S
from glmv.verify.testing.stacks import Stalemate, shortened, stands_in, waits_in

if TYPE_CHECKING:
    from glmv.verify.testing.board import Board

POLL_S = 0.25
# A rank whose watcher says nothing for so long is lost; a launcher usually tells sooner.
SILENCE_S = 60.0
# How long rank 0 waits for the others to say where they stand. A launcher that ends ranks gives them 30 s.
STACKS_S = 10.0


class Watcher(threading.Thread):
    """See the module. `judge(told)` is called on rank 0 with the ranks of the test that cannot be finished."""

    def __init__(self, board: Board, rank: int, world_size: int, judge: Callable[[list[Told]], None]) -> None:
        super().__init__(name="glmv-watcher", daemon=True)
        self.board, self.rank, self.world_size, self.judge = board, rank, world_size, judge
        self.lock = threading.Lock()
        self.test = 0
        self.running = False
        self.deadline: float | None = None
        self.stopped = False
        self._stalemate = Stalemate()
        self._grace: float | None = None
        self._said = ""
        self._all_wait_since: float | None = None
        self._beats: dict[int, tuple[int, float]] = {}
        self._terminated, self._waker = socket.socketpair()
        self._waker.setblocking(False)

    def listen(self) -> None:
        """Take SIGTERM, also while the main thread hangs. To be called from the main thread."""
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def begin(self, test: int, timeout_s: float | None) -> None:
        """A test begins on this rank."""
        with self.lock:
            self.test, self._grace = test, None
            self.deadline = time.monotonic() + timeout_s if timeout_s else None
            self._stalemate.restart()
            self._said, self._all_wait_since = "", None
            self.running = True

    def finish(self) -> None:
        """All ranks have finished the test. Does not return if they are about to be ended."""
        with self.lock:
            self.running = False

    def run(self) -> None:
        """Look around a few times a second."""
        beat = 0
        try:
            while not self.stopped:
                readable, _, _ = select.select([self._terminated], [], [], POLL_S)
                beat += 1
                self.board.put(f"beat/{self.rank}", beat)
                with self.lock:
                    if readable and signal.SIGTERM in self._terminated.recv(64):
                        self._on_sigterm()
                    elif self.board.get("end") is not None:
                        self._leave()
                    elif self.running:
                        self._look()
        except Exception as error:  # without the board nothing can be agreed upon any more
            print(f"rank {self.rank}: lost the other ranks ({error})", file=sys.stderr, flush=True)
            os._exit(1)

    def _look(self) -> None:
        idle_s = self._stalemate.idle_s([os.getpid()], without=threading.get_native_id())
        waits = waits_in(self._stack()) if idle_s > IDLE_S else ""
        if waits != self._said:
            self._said = waits
            self.board.put(f"{self.test}/waits/{self.rank}", waits)
        if self.rank == 0 and (why := self._why_to_end()) is not None:
            self._end(why)

    def _why_to_end(self) -> str | None:
        now = time.monotonic()
        open_ranks = [r for r in range(self.world_size) if self.board.get(f"{self.test}/done/{r}") is None]
        if not open_ranks:
            return None
        if self._grace is None and any(self.board.get(f"{self.test}/red/{r}") for r in range(self.world_size)):
            self._grace = now + GRACE_S
        if self._grace is not None and now > self._grace:
            return ""
        if self.deadline is not None and now > self.deadline:
            return "was not done in time"
        if self._all_wait(open_ranks, now):
            return "will wait for ever"
        return "was lost" if any(self._silent(rank, now) for rank in open_ranks) else None

    def _all_wait(self, ranks: list[int], now: float) -> bool:
        """Whether they do, and for so long that none of them can have said so before it went on."""
        if not all(self.board.get(f"{self.test}/waits/{rank}") for rank in ranks):
            self._all_wait_since = None
        elif self._all_wait_since is None:
            self._all_wait_since = now
        return self._all_wait_since is not None and now - self._all_wait_since > 4 * POLL_S

    def _silent(self, rank: int, now: float) -> bool:
        beat = self.board.get(f"beat/{rank}") or 0
        if self._beats.get(rank, (None, 0.0))[0] != beat:
            self._beats[rank] = beat, now
        return now - self._beats[rank][1] > SILENCE_S

    def _on_sigterm(self) -> None:
        """A launcher ends all ranks because one is gone: rank 0 finds out which, and in which test."""
        if self.rank == 0:
            self._end("was ended by SIGTERM")
        self._leave()

    def _end(self, why: str) -> None:
        """On rank 0: collect what is known of all ranks, judge, and end the process."""
        self.board.put("end", why)
        self._say_stack()
        deadline = time.monotonic() + STACKS_S
        ranks = range(self.world_size)
        while time.monotonic() < deadline and not all(self.board.get(f"stack/{r}") is not None for r in ranks):
            time.sleep(0.05)
        self.judge([self._told(rank, why) for rank in ranks])
        self.board.put("judged", True)
        os._exit(1)

    def _told(self, rank: int, why: str) -> Told:
        from glmv.verify.testing.torchrun import reports_of

        told = Told(rank, reports_of(self.board, self.test, rank))
        told.failed_at = self.board.get(f"{self.test}/red/{rank}") or 0.0
        told.done = self.board.get(f"{self.test}/done/{rank}") is not None
        stack = self.board.get(f"stack/{rank}")
        if stack is None:
            told.problem, told.died = f"died {self._phase(rank)}", True
        elif not told.done and told.failure is None:
            told.stack = shortened(stack)
            place = f"was waiting in {waits_in(stack)}" if waits_in(stack) else f"stood in {stands_in(stack)}"
            told.problem = f"{why}: it {place}" if why else place
        return told

    def _phase(self, rank: int) -> str:
        phase = self.board.get(f"phase/{rank}")
        return f"in the {phase[0]} of {phase[1]}" if phase else "before it had begun a test"

    def _leave(self) -> None:
        """On any rank: say where it stands, let rank 0 judge, and end the process."""
        self._say_stack()
        deadline = time.monotonic() + 2 * STACKS_S
        while time.monotonic() < deadline and self.board.get("judged") is None:
            time.sleep(0.05)
        os._exit(1)

    def _say_stack(self) -> None:
        self.board.put(f"stack/{self.rank}", self._stack())

    def _stack(self) -> str:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return "\n\n".join(part for part in file.read().split("\n\n") if "glmv/verify/testing/watcher" not in part)

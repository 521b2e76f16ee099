"""A pool: N warm ranks that run one test after another, for as long as they agree."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from glmv.verify.testing.channel import Channel, Message
from glmv.verify.testing.hand_over import rank_options, received
from glmv.verify.testing.journal import last_entry
from glmv.verify.testing.merge import Told, in_step, merge
from glmv.verify.testing.stacks import Stalemate, dump, shortened, stands_in, waits_in
from glmv.verify.testing.template import Spawner

# For the first rank of a session the template has yet to import torch.
START_S = 300.0
# How long the others may go on once a rank is red: if they do nothing, and if they are on their way to fail themselves.
GRACE_S = 2.0
GRACE_AT_WORK_S = 20.0
IDLE_S = 3.0
CLOSE_S = 5.0
POLL_S = 0.25


@dataclass(frozen=True)
class Kind:
    """What a test asks of its pool."""

    world_size: int
    device: str
    emulated: bool

    def __str__(self) -> str:
        return f"{self.world_size}-{self.device}{'-emulated' if self.emulated else ''}"


@dataclass
class Member:
    """One rank as its pool sees it."""

    channel: Channel
    directory: Path
    pid: int = 0
    exit_code: int | None = None
    ready: bool = False
    cases: list[str] | None = None
    printed_bytes: int = 0
    told: Told = field(default_factory=lambda: Told(0))

    @property
    def over(self) -> bool:
        """Nothing more will come for this test."""
        return self.told.done or bool(self.told.problem)

    def take_printed(self) -> str:
        """What the rank has printed since this was last asked; it goes to a file, which outlives the rank."""
        output = self.directory / "output"
        if not output.exists():
            return ""
        with open(output, "rb") as file:
            file.seek(self.printed_bytes)
            printed = file.read()
        self.printed_bytes += len(printed)
        return printed.decode(errors="replace")


class Pool:
    """N ranks, forked from a template. A pool whose ranks are no longer in step is `broken` and of no use."""

    def __init__(self, kind: Kind, config: pytest.Config, address: str, directory: Path, file: str) -> None:
        """Ask the template at `address` for the ranks.

        Args:
            directory: for what they print and note.   file: what they collect first.
        """
        from glmv.parallel.launch import rendezvous

        self.kind, self.config, self.directory = kind, config, directory
        self.broken = False
        self.began = time.monotonic()
        self._tests = 0
        self._store = rendezvous(START_S)
        self._spawner = Spawner(address)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._spawner, selectors.EVENT_READ)
        self.members = [self._start(rank, file) for rank in range(kind.world_size)]

    def _start(self, rank: int, file: str) -> Member:
        ours, theirs = socket.socketpair()
        directory = self.directory / f"rank{rank}"
        directory.mkdir()
        member = Member(Channel(ours), directory, told=Told(rank))
        request = directory / "request.json"
        request.write_text(json.dumps(self._request(rank, directory, file)), encoding="utf-8")
        with theirs:
            self._spawner.spawn(request, theirs)
        self._selector.register(member.channel, selectors.EVENT_READ, member)
        return member

    def _request(self, rank: int, directory: Path, file: str) -> dict[str, Any]:
        from glmv.parallel.launch import worker_environment

        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST_")}
        return {
            "module": "glmv.verify.testing.child",
            "env": env | worker_environment(rank, self.kind.world_size, self._store.port),
            "cwd": os.getcwd(),
            "path": sys.path,
            "output": str(directory / "output"),
            "stacks": str(directory / "stacks"),
            "journal": str(directory / "journal"),
            "rank": rank,
            "world_size": self.kind.world_size,
            "device": self.kind.device,
            "emulated": self.kind.emulated,
            "file": str(self.config.rootpath / file),
            "options": rank_options(self.config, directory / "tmp"),
        }

    def run(
        self, item: pytest.Item, following: str | None, timeout_s: float | None, cases: list[str] | None = None
    ) -> list[pytest.TestReport]:
        """Run a test on all ranks.

        Args:
            cases: node ids of all cases of the test's function; None if this session did not collect all.
            following: the test of this pool that will probably come next; fixtures which it shares are kept.
            timeout_s: for the test, without the start of the ranks; None for no limit.
        Returns:
            One report per phase.
        """
        for member in self.members:
            member.told, member.cases = Told(member.told.rank), None
        began = time.monotonic()
        ready, self.broken = not self.broken and self._wait_until_ready(), True
        if ready:
            self._command(item.nodeid, following)
            self._watch(timeout_s, cases)
        for member in self.members:
            member.told.printed = member.take_printed()
        told = [member.told for member in self.members]
        reports = merge(item.nodeid, item.location, told, time.monotonic() - began)
        self.broken = not in_step(told)
        return reports

    def _wait_until_ready(self) -> bool:
        deadline = self.began + START_S
        while not all(member.ready for member in self.members):
            if any(member.over for member in self.members):
                self._end_the_others("waited for the others to start")
                return False
            if time.monotonic() > deadline:
                self._end_the_others(f"did not start within {START_S:.0f} s")
                return False
            self._receive()
        return True

    def _command(self, nodeid: str, following: str | None) -> None:
        self._tests += 1
        shared = self.directory / f"shared{self._tests}"
        shared.mkdir()
        for member in self.members:
            with contextlib.suppress(OSError):  # a rank that died since the last test: its template will tell
                member.channel.send({"nodeid": nodeid, "next": following, "shared": str(shared)})

    def _watch(self, timeout_s: float | None, expected: list[str] | None) -> None:
        """Receive until every rank has told its end, or has to be ended."""
        deadline = time.monotonic() + (timeout_s or float("inf"))
        red_since: float | None = None
        stalemate = Stalemate()
        while not all(member.over for member in self.members):
            self._receive()
            self._compare_cases(expected)
            waiting = [member for member in self.members if not member.over]
            # This process serves the store through which ranks find each other.
            pids = [os.getpid(), *(member.pid for member in waiting)]
            idle_s, now = stalemate.idle_s(pids, without=threading.get_native_id()), time.monotonic()
            if red_since is None and any(member.told.problem or member.told.failure for member in self.members):
                red_since = now
            grace_s = GRACE_S if idle_s > GRACE_S else GRACE_AT_WORK_S
            if red_since is not None and now - red_since > grace_s:
                return self._end_the_others("")
            if now > deadline:
                return self._end_the_others(f"was not done after {timeout_s:g} s")
            if idle_s > IDLE_S:
                if all(map(waits_in, self._stacks(waiting))):
                    return self._end_the_others("will wait for ever")
                stalemate.restart()
        return None

    def _receive(self) -> None:
        for key, _ in self._selector.select(POLL_S):
            if key.fileobj is self._spawner:
                self._hear_of_births_and_deaths()
            else:
                messages, alive = key.data.channel.receive_all()
                for message in messages:
                    self._take(key.data, message)
                if not alive:
                    self._selector.unregister(key.fileobj)
        for member in self.members:
            if member.exit_code is not None and not member.over and member.channel not in self._readable():
                member.told.problem, member.told.died = self._death(member), True

    def _readable(self) -> list[Any]:
        return [key.fileobj for key in self._selector.get_map().values()]

    def _hear_of_births_and_deaths(self) -> None:
        message = self._spawner.receive()
        if message is None:
            self._selector.unregister(self._spawner)
            for member in self.members:
                member.told.problem = member.told.problem or "lost its template process"
            return
        member = self.members[message["rank"]]
        member.pid = message.get("pid", member.pid)
        member.exit_code = message.get("exit_code", member.exit_code)

    def _take(self, member: Member, message: Message) -> None:
        told = member.told
        match message["kind"]:
            case "ready":
                member.ready = True
            case "broken":
                told.problem = f"could not start:\n{message['text']}"
            case "collected":
                member.cases = message["cases"]
            case "missing":
                told.problem = f"did not collect this test. {message['text']}".rstrip()
            case "report":
                report = received(message["data"])
                told.reports[report.when] = report
                told.failed_at = told.failed_at or (time.monotonic() if report.failed else 0.0)
            case "done":
                told.done, told.collectives, told.sound = True, message["collectives"], message["sound"]

    def _compare_cases(self, expected: list[str] | None) -> None:
        """A rank that has other cases of the test's function than it should is red."""
        for member in self.members:
            cases = member.cases
            should = expected or self.members[0].cases
            if cases is None or should is None or cases == should or "collected" in member.told.problem:
                continue
            whom = "this session" if expected else "rank 0"
            what = f"collected {cases or 'no case'}, {whom} collected {should or 'no case'}"
            member.told.problem = f"{what}. {member.told.problem}".rstrip(" .")

    def _death(self, member: Member) -> str:
        code, where = member.exit_code or 0, last_entry(member.directory / "journal")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended its process with exit code {code}"
        return f"{how} {where}"

    def _stacks(self, members: list[Member]) -> list[str]:
        return dump([member.pid for member in members], [member.directory / "stacks" for member in members])

    def _end_the_others(self, why: str) -> None:
        """Have the ranks that are not over print their stacks, and give this pool up."""
        others = [member for member in self.members if not member.over and member.pid]
        for member, stack in zip(others, self._stacks(others), strict=True):
            member.told.stack = shortened(stack)
            place = f"was waiting in {waits_in(stack)}" if waits_in(stack) else f"stood in {stands_in(stack)}"
            member.told.problem = f"{why}: it {place}" if why else place
        for member in self.members:
            if not member.over:
                member.told.problem = why

    def close(self) -> None:
        """Let the ranks leave, and kill those that do not."""
        for member in self.members:
            member.channel.close()
        deadline = time.monotonic() + (0 if self.broken else CLOSE_S)
        self._selector.close()
        with selectors.DefaultSelector() as selector:
            selector.register(self._spawner, selectors.EVENT_READ)
            while time.monotonic() < deadline and any(member.exit_code is None for member in self.members):
                if selector.select(POLL_S):
                    message = self._spawner.receive()
                    if message is None:
                        break
                    member = self.members[message["rank"]]
                    member.exit_code = message.get("exit_code", member.exit_code)
        self._spawner.close()

"""A pool: N warm ranks that run one test after another, for as long as they agree."""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from glmv.verify.testing.channel import Channel, Message
from glmv.verify.testing.journal import last_entry
from glmv.verify.testing.merge import Told, merge
from glmv.verify.testing.stacks import Stalemate, dump, stands_in, waits_in
from glmv.verify.testing.template import Spawner

# For the first rank of a session the template has yet to import torch.
START_S = 180.0
# How long the others may go on once a rank is red: long enough to fail by themselves, if they do.
GRACE_S = 3.0
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
    collected: list[str] = field(default_factory=list)
    told: Told = field(default_factory=lambda: Told(0))

    @property
    def over(self) -> bool:
        """Nothing more will come for this test."""
        return self.told.done or bool(self.told.problem)


class Pool:
    """N ranks, forked from a template. A pool in which a test was not green on all ranks is `broken` and of no use."""

    def __init__(self, kind: Kind, config: pytest.Config, address: str, directory: Path, file: str) -> None:
        """Ask the template at `address` for the ranks; they collect `file` first and keep their files in `directory`."""
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

    def run(self, item: pytest.Item, following: str | None, timeout_s: float | None) -> list[pytest.TestReport]:
        """Run a test on all ranks.

        Args:
            following: the test of this pool that will probably come next; fixtures which it shares are kept.
            timeout_s: for the test, without the start of the ranks; None for no limit.
        Returns:
            One report per phase.
        """
        for member in self.members:
            member.told = Told(member.told.rank)
        if self._wait_until_ready():
            self._command(item.nodeid, following)
            self._watch(timeout_s)
        told = [member.told for member in self.members]
        reports = merge(item.nodeid, item.location, told)
        self.broken = any(report.failed for report in reports) or any(member.told.problem for member in self.members)
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
            member.channel.send({"nodeid": nodeid, "next": following, "shared": str(shared)})

    def _watch(self, timeout_s: float | None) -> None:
        """Receive until every rank has told its end, or has to be ended."""
        deadline = time.monotonic() + (timeout_s or float("inf"))
        grace: float | None = None
        stalemate = Stalemate(IDLE_S)
        while not all(member.over for member in self.members):
            self._receive()
            self._compare_collections()
            now = time.monotonic()
            if grace is None and any(member.told.problem or member.told.failure for member in self.members):
                grace = now + GRACE_S
            if grace is not None and now > grace:
                return self._end_the_others("")
            if now > deadline:
                return self._end_the_others(f"was not done after {timeout_s:g} s")
            waiting = [member for member in self.members if not member.over]
            if stalemate.idle([member.pid for member in waiting]):
                stacks = self._stacks(waiting)
                if all(map(waits_in, stacks)):
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
                member.told.problem = self._death(member)

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
                member.collected = message["ids"]
            case "missing":
                told.problem = f"did not collect this test. {message['text']}".rstrip()
            case "report":
                report = self.config.hook.pytest_report_from_serializable(config=self.config, data=message["data"])
                told.reports[report.when] = report
            case "done":
                told.done, told.collectives = True, message["collectives"]

    def _compare_collections(self) -> None:
        lists = [member.collected for member in self.members]
        if not all(lists) or all(ids == lists[0] for ids in lists):
            return
        for member, ids in zip(self.members, lists, strict=True):
            surplus, lacking = sorted(set(ids) - set(lists[0])), sorted(set(lists[0]) - set(ids))
            if ids != lists[0] and "collected" not in member.told.problem:
                what = f"collected other tests than rank 0: it has {surplus or 'none'} more and lacks {lacking or 'none'}"
                member.told.problem = f"{what}. {member.told.problem}".rstrip()

    def _death(self, member: Member) -> str:
        from glmv.verify.testing.death import describe

        return describe(member.exit_code or 0, last_entry(member.directory / "journal"), member.directory / "output")

    def _stacks(self, members: list[Member]) -> list[str]:
        return dump([member.pid for member in members], [member.directory / "stacks" for member in members])

    def _end_the_others(self, why: str) -> None:
        """Have the ranks that are not over print their stacks, and give this pool up."""
        others = [member for member in self.members if not member.over and member.pid]
        for member, stack in zip(others, self._stacks(others), strict=True):
            member.told.stack = stack
            place = f"was waiting in {waits_in(stack)}" if waits_in(stack) else f"stood in {stands_in(stack)}"
            member.told.problem = f"{why}: it {place}" if why else place
        for member in self.members:
            if not member.over:
                member.told.problem = why
        self.broken = True

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


def rank_options(config: pytest.Config, basetemp: Path) -> dict[str, Any]:
    """The options of this session for its ranks: what selects, prints or distributes tests stays here."""
    mine = {
        key: value
        for key, value in vars(config.option).items()
        if isinstance(value, str | int | float | bool | None)
        or (isinstance(value, list) and all(isinstance(element, str) for element in value))
    }
    quiet = {
        "keyword": "", "markexpr": "", "deselect": None, "maxfail": 0, "lf": False, "failedfirst": False,
        "stepwise": False, "xmlpath": None, "numprocesses": None, "dist": "no", "tx": [], "usepdb": False,
        "collectonly": False, "durations": None, "setupshow": False, "setuponly": False, "setupplan": False,
    }  # fmt: skip
    plugins = [*mine.get("plugins", []), "no:terminal", "no:cacheprovider", "no:xdist", "no:junitxml"]
    where = {"rootdir": str(config.rootpath), "basetemp": str(basetemp), "plugins": plugins}
    return mine | quiet | where | ({"inifilename": str(config.inipath)} if config.inipath else {})

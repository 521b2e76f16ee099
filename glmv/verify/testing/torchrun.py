"""A pytest session that is one of several ranks under torchrun.

All ranks collect, run the same tests on several ranks in the same order and agree on each verdict before the next one
begins, over a store beside the process group that the tests use. A test on which they cannot agree ends the session:
nothing that is computed on desynchronised ranks afterwards would mean anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from glmv.verify.testing.board import Board
from glmv.verify.testing.child import collectives_issued
from glmv.verify.testing.hand_over import received
from glmv.verify.testing.markers import KIND, TIMEOUT, kind_of, ranks_of
from glmv.verify.testing.merge import PHASES, Told, merge, unlike_collectives
from glmv.verify.testing.npu import announce, choose_npu
from glmv.verify.testing.rank import RANK, Rank
from glmv.verify.testing.watcher import Watcher


def is_torchrun() -> bool:
    """Whether a launcher made this process one of several ranks."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE") or 1) > 1


def refuse_xdist(config: pytest.Config) -> None:
    """Raises pytest.UsageError: the ranks of a launch cannot hand tests to workers of their own."""
    if config.getoption("numprocesses", None) or config.getoption("dist", "no") != "no":
        raise pytest.UsageError("pytest-xdist (-n, --dist) and torchrun exclude each other: leave one of them out.")


def who_am_i() -> tuple[int, int]:
    """(rank, world_size). Raises pytest.UsageError: the launch does not say, or names no port to meet at."""
    from glmv.parallel.process import LaunchError, read_launch_environment

    try:
        return read_launch_environment(os.environ)[:2]
    except LaunchError as error:
        raise pytest.UsageError(str(error)) from None


class TorchrunSession:
    """pytest plugin of one rank."""

    def __init__(self, config: pytest.Config) -> None:
        refuse_xdist(config)
        self.config = config
        rank, world_size = who_am_i()
        config.stash[RANK] = self.me = Rank(rank, world_size, config.getoption("--device"))
        self.board = Board.of_launch()
        self.watcher = Watcher(self.board.another(), rank, world_size, self._judge)
        self.session: pytest.Session | None = None
        self.item: pytest.Item | None = None
        self.test = self.other_worlds = self.emulated = 0
        if rank > 0:
            config.option.xmlpath = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Only rank 0 prints."""
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        if self.me.rank > 0 and reporter is not None:
            reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115 - open for as long as the session lasts

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep what runs on as many ranks as there are; what needs no ranks runs on rank 0 alone."""
        mine = {self.me.world_size, None} if self.me.rank == 0 else {self.me.world_size}
        kept = [item for item in items if ranks_of(item) in mine]
        self.other_worlds = sum(ranks_of(item) not in (self.me.world_size, None) for item in items)
        if any(item.get_closest_marker("npu") for item in kept):
            npu = choose_npu(config.getoption("--npu"))
            if npu.emulated:
                # The emulated device lives in pools only; a process that users start never registers it.
                self.emulated = sum(item.get_closest_marker("npu") is not None for item in kept)
                kept = [item for item in kept if item.get_closest_marker("npu") is None]
            else:
                announce(config, npu)
                self.me.device = "npu"
        if left_out := [item for item in items if item not in kept]:
            config.hook.pytest_deselected(items=left_out)
        # What needs no ranks comes first: in a process group, code for a single process would wait for the others.
        items[:] = sorted(kept, key=lambda item: ranks_of(item) is not None)
        for item in items:
            if (kind := kind_of(item)) is not None:
                item.stash[KIND] = kind

    def pytest_report_collectionfinish(self) -> str:
        """Say what this launch does not run."""
        said = f"{self.me.world_size} ranks; {self.other_worlds} tests are for other numbers of ranks and not run"
        return said + (f"; {self.emulated} need the emulated npu, which plain pytest has" if self.emulated else "")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """All ranks must have collected the same tests in the same order."""
        self.session = session
        ids = [item.nodeid for item in session.items if KIND in item.stash]
        self.board.put(f"collected/{self.me.rank}", ids)
        everyone = self.board.wait_for_ranks(*(f"collected/{rank}" for rank in range(self.me.world_size)))
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise pytest.UsageError(_difference(rank, theirs, everyone[0]) if self.me.rank == 0 else "see rank 0")
        self.watcher.listen()
        self.watcher.start()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a test on all ranks and log their common verdict."""
        if KIND not in item.stash:
            return None
        self.test, self.item = self.test + 1, item
        if self.me.rank == 0:
            self.board.put(f"{self.test}/go", str(self.config._tmp_path_factory.mktemp("shared")))  # type: ignore[attr-defined]
        [shared] = self.board.wait_for_ranks(f"{self.test}/go")
        self.me.shared = Path(shared)
        began = time.monotonic()
        self.watcher.begin(self.test, item.stash.get(TIMEOUT, None))
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        runtestprotocol(item, nextitem=nextitem, log=False)
        told = self._exchange()
        self.watcher.finish()
        self._log(item, told, time.monotonic() - began)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Tell the others at once: this rank may yet hang in the test's teardown."""
        report: Any = yield
        if KIND in item.stash:
            data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
            self.board.put(f"{self.test}/{report.when}/{self.me.rank}", data)
            if report.failed:
                self.board.put(f"{self.test}/red/{self.me.rank}", time.time())
        return report

    def _exchange(self) -> list[Told]:
        self.board.put(f"{self.test}/done/{self.me.rank}", {"collectives": collectives_issued()})
        ends = self.board.wait_for_ranks(*(f"{self.test}/done/{rank}" for rank in range(self.me.world_size)))
        ranks = []
        for rank, end in enumerate(ends):
            told = Told(rank, reports_of(self.board, self.test, rank), done=True, collectives=end["collectives"])
            told.failed_at = self.board.get(f"{self.test}/red/{rank}") or 0.0
            ranks.append(told)
        return ranks

    def _log(self, item: pytest.Item, ranks: list[Told], seconds: float) -> None:
        alike = len({_outcomes(told) for told in ranks}) == 1 and not unlike_collectives(ranks)
        for report in merge(item.nodeid, item.location, ranks, seconds):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if not alike:
            item.session.shouldstop = f"the ranks are no longer alike after {item.nodeid}"

    def _judge(self, ranks: list[Told]) -> None:
        """Called by rank 0's watcher when a test cannot be finished: report it, and write what there is to write."""
        if self.item is not None and self.session is not None:
            if (capture := self.config.pluginmanager.getplugin("capturemanager")) is not None:
                capture.suspend_global_capture(in_=True)
            # Fixtures of this rank hang in what cannot be finished: leave them to the end of the process.
            self.session._setupstate.stack.clear()
            for report in merge(self.item.nodeid, self.item.location, ranks):
                self.item.ihook.pytest_runtest_logreport(report=report)
            self.session.shouldstop = "the ranks cannot go on together"
            self.config.hook.pytest_sessionfinish(session=self.session, exitstatus=pytest.ExitCode.TESTS_FAILED)
            if (reporter := self.config.pluginmanager.getplugin("terminalreporter")) is not None:
                reporter._tw.line()
                reporter._tw.flush()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Note where this rank is."""
        self._note("setup", item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Note where this rank is."""
        self._note("call", item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Note where this rank is."""
        self._note("teardown", item)

    def _note(self, phase: str, item: pytest.Item) -> None:
        self.board.put(f"phase/{self.me.rank}", [phase, item.nodeid])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A rank that had nothing to run is none that failed."""
        self.watcher.stopped = True
        if self.me.rank > 0 and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK


def reports_of(board: Board, test: int, rank: int) -> dict[str, pytest.TestReport]:
    """The reports that a rank has told of a test, by phase."""
    found = {phase: board.get(f"{test}/{phase}/{rank}") for phase in PHASES}
    return {phase: received(data) for phase, data in found.items() if data is not None}


def _outcomes(told: Told) -> tuple[str, ...]:
    return tuple(told.reports[phase].outcome if phase in told.reports else "-" for phase in PHASES)


def _difference(rank: int, ids: list[str], first: list[str]) -> str:
    more, fewer = [i for i in ids if i not in first], [i for i in first if i not in ids]
    if not more and not fewer:
        return f"rank {rank} collected the same tests as rank 0 in another order."
    return f"rank {rank} collected other tests than rank 0; it has in addition {more}, it lacks {fewer}."

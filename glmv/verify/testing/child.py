"""A rank of a pool: a pytest session that runs single tests on command and sends its reports back."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest
from _pytest.config import Config

from glmv.verify.testing.channel import Channel, Message
from glmv.verify.testing.journal import Journal
from glmv.verify.testing.rank import RANK, Rank


def main(request: dict[str, Any], control: socket.socket) -> int:
    """Be the rank that a pool asked for, until the pool hangs up.

    Args:
        request: see `Pool._request`.   control: the channel to the pool.
    Returns:
        The exit code of the process.
    """
    channel = Channel(control)
    try:
        if request["emulated"]:
            _emulate(request["world_size"])
        config = Config.fromdictargs(request["options"], [request["file"]])
        config.stash[RANK] = Rank(request["rank"], request["world_size"], request["device"])
        config.pluginmanager.register(RankSession(channel, Journal(Path(request["journal"]))), "glmv-rank-session")
        return int(config.hook.pytest_cmdline_main(config=config))
    except BaseException:
        channel.send({"kind": "broken", "text": traceback.format_exc()})
        raise


def _emulate(world_size: int) -> None:
    from glmv.verify.emulated_npu import install

    install(devices=world_size, poison=True)


class RankSession:
    """pytest plugin: the loop over tests asks the pool which one is next."""

    def __init__(self, channel: Channel, journal: Journal) -> None:
        self.channel, self.journal = channel, journal
        self.items: dict[str, dict[str, pytest.Item]] = {}
        self.errors: dict[str, str] = {}
        self.directories: set[Path] = set()
        self.sound = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run what the pool asks for until it hangs up."""
        for item in session.items:
            self.items.setdefault(item.nodeid.partition("::")[0], {})[item.nodeid] = item
        self.channel.send({"kind": "ready"})
        while (command := self.channel.receive()) is not None:
            self._run(session, command)
        return True

    def _run(self, session: pytest.Session, command: Message) -> None:
        items = self._items_of(session, command["nodeid"])
        self.channel.send({"kind": "collected", "cases": cases_of(command["nodeid"], items)})
        item = items.get(command["nodeid"])
        if item is None:
            self.channel.send({"kind": "missing", "text": self.errors.get(command["nodeid"].partition("::")[0], "")})
            return
        session.config.stash[RANK].shared = Path(command["shared"])
        following = command["next"]
        nextitem = self._items_of(session, following).get(following) if following else None
        self.sound = True
        # The pool's guess which test comes next may have been wrong: tear down what this one has no part in.
        session._setupstate.teardown_exact(item)
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        self.journal.write("finished", item.nodeid)
        self.channel.send({"kind": "done", "collectives": collectives_issued(), "sound": self.sound})

    def _items_of(self, session: pytest.Session, nodeid: str) -> dict[str, pytest.Item]:
        file = nodeid.partition("::")[0]
        if file not in self.items:
            collected = session.perform_collect([str(session.config.rootpath / file)])
            self.items[file] = {item.nodeid: item for item in collected}
        return self.items[file]

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Bind a conftest's fixtures to the directory's node of this collection too.

        pytest binds them to the first node it makes of the directory, and every further file comes with new ones.
        """
        report = yield
        if isinstance(collector, pytest.Directory):
            manager = collector.session._fixturemanager
            conftest = collector.config.pluginmanager.get_plugin(str(collector.path / "conftest.py"))
            if conftest is not None and self.collected_before(collector):
                manager.parsefactories(holder=conftest, node=collector)
        return report

    def collected_before(self, directory: pytest.Directory) -> bool:
        """Whether another node of this directory was collected before."""
        known = directory.path in self.directories
        self.directories.add(directory.path)
        return known

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep why a file could not be collected."""
        if report.failed:
            self.errors[report.nodeid.partition("::")[0]] = report.longreprtext

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Hand the report on to the pool."""
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.channel.send({"kind": "report", "data": data})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A test that judged and said no leaves a sound rank; after any other error nobody knows what is broken."""
        report = yield
        judged = call.excinfo is None or isinstance(call.excinfo.value, AssertionError | pytest.fail.Exception)
        self.sound = self.sound and (not report.failed or (report.when == "call" and judged))
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Remember the config for the hooks that get none."""
        self.config = config

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Note where this rank is."""
        self.journal.write("setup", item.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Note where this rank is."""
        self.journal.write("call", item.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Note where this rank is."""
        self.journal.write("teardown", item.nodeid)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self) -> bool:
        """The pool keeps the time, for all ranks at once."""
        return True

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_cancel_timer(self) -> bool:
        """See `pytest_timeout_set_timer`."""
        return True


def cases_of(nodeid: str, ids: Iterable[str]) -> list[str]:
    """Among `ids`, the cases of the test function that `nodeid` is a case of."""
    function = nodeid.partition("[")[0]
    return [other for other in ids if other.partition("[")[0] == function]


def collectives_issued() -> dict[str, int]:
    """How many collectives of the CPU this rank has issued, by the process groups that it is in."""
    import torch
    import torch.distributed as dist

    issued = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        # An accelerator's group has a backend for each device and no number of its own; gloo is always among them.
        cpu: Any = group._get_backend(torch.device("cpu"))
        name = f"{group.group_name} of ranks {dist.get_process_group_ranks(group)}"
        issued[name] = int(cpu._get_sequence_number_for_group())
    return issued

"""pytest plugin: tests on several ranks and tests on an NPU, from a plain `pytest`.

A test with the marker `world_size(n)` runs on n ranks at once, each of which executes the test; one with the marker
`npu` runs on an NPU, or where there is none on the emulated device. Neither runs in this process but in a pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from glmv.verify.testing.fixtures import (  # noqa: F401 (fixtures of this plugin)
    device,
    process,
    shared_dir,
    shared_dir_factory,
)
from glmv.verify.testing.lockstep import keep_in_step, load_profile
from glmv.verify.testing.markers import KIND, MARKERS, TIMEOUT, kind_of
from glmv.verify.testing.npu import NPU, Npu, announce, choose_npu, require_npu
from glmv.verify.testing.pools import Pools
from glmv.verify.testing.rank import RANK
from glmv.verify.testing.torchrun import TorchrunSession, is_torchrun

POOLS = pytest.StashKey[Pools]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where tests run."""
    group = parser.getgroup("glmv", "devices and ranks")
    group.addoption(
        "--device", default="cpu", choices=["cpu", "cuda", "npu"],
        help="where tests with the `device` fixture run; those with the marker npu have their own",
    )  # fmt: skip
    group.addoption(
        "--npu", default="auto", choices=["auto", "real", "emulated"],
        help="what tests with the marker npu run on; auto: a real NPU if there is one, else the emulated device",
    )  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Make the markers known, and find out what this session is: a rank of a pool, a rank of torchrun, or neither."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if RANK in config.stash:
        load_profile()
        return
    if config.getoption("--device") == "npu":
        require_npu("--device npu")
    if is_torchrun():
        load_profile()
        config.pluginmanager.register(TorchrunSession(config), "glmv-torchrun")
    else:
        config.stash[POOLS] = pools = Pools(config)
        if getattr(config.option, "numprocesses", None):
            pools.share_template()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Remember what was collected, for the ranks to compare."""
    if POOLS in item.config.stash:
        item.config.stash[POOLS].collected(item)


@pytest.hookimpl(wrapper=True)
def pytest_collection_finish(session: pytest.Session) -> Iterator[None]:
    """Say for every item on how many ranks of which kind it runs; the NPU first of all, for it is in the header."""
    config = session.config
    if POOLS not in config.stash:
        return (yield)
    if any(item.get_closest_marker("npu") for item in session.items):
        announce(config, choose_npu(config.getoption("--npu")))
    result = yield
    for item in session.items:
        if (kind := kind_of(item)) is not None:
            item.stash[KIND] = kind
    config.stash[POOLS].plan(session.items)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run an item on ranks in its pool; any other goes its usual way."""
    if KIND not in item.stash or POOLS not in item.config.stash:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = item.config.stash[POOLS].run(item)
    _tear_down_here(item, nextitem, reports)
    _show(item.config, reports)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _show(config: pytest.Config, reports: list[pytest.TestReport]) -> None:
    """With `-s`, print what the ranks printed."""
    if config.getoption("capture") == "no":
        for title, text in (section for report in reports for section in report.sections):
            print(f"\n--- {title}\n{text}", end="", flush=True)


def _tear_down_here(item: pytest.Item, nextitem: pytest.Item | None, reports: list[pytest.TestReport]) -> None:
    """End fixtures of this process that earlier items kept because this one is in the same module."""
    call = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), "teardown")
    if call.excinfo is not None:
        reports[-1] = pytest.TestReport.from_item_and_call(item, call)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """On a rank: the examples of hypothesis are drawn in step with the other ranks."""
    keep_in_step(item)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: object) -> bool | None:
    """Of an item on ranks the pool keeps the time: it can say where each rank stands."""
    if KIND not in item.stash:
        return None
    item.stash[TIMEOUT] = getattr(settings, "timeout", None) or None
    return True


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool | None:
    """See `pytest_timeout_set_timer`."""
    return True if KIND in item.stash else None


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """End every process that this session started."""
    try:
        return (yield)
    finally:
        if NPU in session.config.stash and hasattr(session.config, "workeroutput"):
            npu = session.config.stash[NPU]
            session.config.workeroutput["npu"] = (npu.name, npu.why)
        if POOLS in session.config.stash:
            session.config.stash[POOLS].close()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:  # noqa: ANN401 - a class of pytest-xdist
    """A worker of pytest-xdist says which NPU it had: this session itself has collected nothing."""
    if NPU not in node.config.stash and "npu" in getattr(node, "workeroutput", {}):
        announce(node.config, Npu(*node.workeroutput["npu"]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what the NPU of this session was."""
    if NPU in config.stash:
        terminalreporter.section("npu")
        terminalreporter.line(str(config.stash[NPU]))


def pytest_report_collectionfinish(config: pytest.Config) -> str | None:
    """Say what the NPU of this session is, if any test asks for one."""
    return str(config.stash[NPU]) if NPU in config.stash else None

"""Runs every fault's killer tests with the fault in place, each in a fork of one warm process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from glmv.verify.faults.fault import ROOT, DeadFaultError, Fault
from glmv.verify.faults.hook import VARIABLE

HEALTHY = "(no fault)"


@dataclass(frozen=True)
class Verdict:
    """What the killers said. `outcomes` maps each named killer to True if it turned red."""

    fault: str
    outcomes: dict[str, bool]
    dead: str = ""

    @property
    def good(self) -> bool:
        """All killers red; for the healthy row, all green."""
        wanted = self.fault != HEALTHY
        return not self.dead and bool(self.outcomes) and all(red == wanted for red in self.outcomes.values())


class _Outcomes:
    """pytest plugin: which tests ran, and which of them turned red."""

    def __init__(self) -> None:
        self.red: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: object) -> None:
        node: str = report.nodeid  # type: ignore[attr-defined]
        if report.when == "call" or report.failed:  # type: ignore[attr-defined]
            self.red[node] = self.red.get(node, False) or bool(report.failed)  # type: ignore[attr-defined]


def run_faults(faults: Sequence[Fault], jobs: int, done: Callable[[Verdict], None]) -> list[Verdict]:
    """Verdicts of all faults, and first of the healthy code on all killers.

    Args:
        jobs: forks at a time.   done: called with each verdict as it comes.
    """
    _warm_up()
    touched = sorted({fault.module for fault in faults} & sys.modules.keys())
    assert not touched, f"imported before a fault could be put in: {touched}"
    killers = tuple(dict.fromkeys(killer for fault in faults for killer in fault.killers))
    waiting: list[tuple[str, tuple[str, ...]]] = [(HEALTHY, killers)]
    verdicts = {}
    for fault in faults:
        try:
            fault.apply(fault.path.read_text(encoding="utf-8"))
            waiting.append((fault.id, fault.killers))
        except (DeadFaultError, OSError) as error:
            verdicts[fault.id] = Verdict(fault.id, {}, dead=str(error))
            done(verdicts[fault.id])
    for verdict in _run_all(waiting, jobs):
        verdicts[verdict.fault] = verdict
        done(verdict)
    return [verdicts[name] for name in (HEALTHY, *(fault.id for fault in faults))]


def _run_all(waiting: list[tuple[str, tuple[str, ...]]], jobs: int) -> Iterator[Verdict]:
    running: dict[int, tuple[str, tuple[str, ...], int]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name, killers = waiting.pop(0)
            pid, pipe = _fork(name, killers)
            running[pid] = (name, killers, pipe)
        pid, _ = os.wait()
        name, killers, pipe = running.pop(pid)
        with os.fdopen(pipe) as results:
            said = results.read()
        red: dict[str, bool] = json.loads(said) if said else {}
        yield Verdict(name, {killer: _is_red(killer, red, name) for killer in killers})


def _is_red(killer: str, red: dict[str, bool], name: str) -> bool:
    """A killer without any result ended its process: red under a fault, and in the healthy row too."""
    cases = [value for node, value in red.items() if node == killer or node.startswith(f"{killer}[")]
    return any(cases) if cases else True


def _fork(name: str, killers: Sequence[str]) -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    os.close(reading)
    status = 1
    try:
        outcomes = _run_killers(name, killers)
        os.write(writing, json.dumps(outcomes).encode())
        status = 0
    finally:
        os._exit(status)


def _run_killers(name: str, killers: Sequence[str]) -> dict[str, bool]:
    import pytest

    from glmv.verify.faults.hook import install_or_refuse

    os.chdir(ROOT)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    if name != HEALTHY:
        os.environ[VARIABLE] = name
        install_or_refuse()
    outcomes = _Outcomes()
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *killers], plugins=[outcomes])
    return outcomes.red


def _warm_up() -> None:
    """Import what every test needs and no fault touches: torch and transformers take seconds."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import pytest  # noqa: F401
    import torch.distributed.fsdp  # noqa: F401
    import transformers.models.glm4v_moe.modeling_glm4v_moe  # noqa: F401

"""Runs every fault's killer tests with the fault in place, each in a fork of one warm process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from glmv.errors import GlmvError
from glmv.verify.faults.fault import ROOT, DeadFaultError, Fault
from glmv.verify.faults.hook import VARIABLE
from glmv.verify.testing.template import ADDRESS, Template

NOT_FOUND = 4  # pytest's exit code for a test that it cannot find
# Killers of nothing: without a fault, in the same processes, they must be green, or red would mean nothing. Two files a
# pool, since a pool serves the killers of one fault from several files.
CONTROL = (
    "tests/unit/ops/test_permute.py::test_all_tokens_on_the_last_expert",
    "tests/distributed/test_meshes.py::test_a_mesh_that_is_asked_for_again_is_the_same_one",
    "tests/distributed/test_hsdp.py::test_copies_are_bit_equal_after_a_step",
    "tests/npu/test_waiting.py::test_a_vision_block",
    "tests/npu/test_npu_experts.py::test_no_tokens[grouped]",
)
FIRST_WRONG = re.compile(r"first wrong: ([^:\n]+)")


@dataclass(frozen=True)
class Verdict:
    """What the killers said. `outcomes` maps each named killer to True if it turned red.

    `dead` says why a fault proves nothing: its line is gone, or a killer is. `named` is what the parity grid called
    wrong first, and `located` whether that is the place where the fault sits (None if the fault does not say).
    """

    fault: str
    outcomes: dict[str, bool]
    dead: str = ""
    named: str = ""
    located: bool | None = None

    @property
    def good(self) -> bool:
        """All killers turned red."""
        return not self.dead and bool(self.outcomes) and all(self.outcomes.values())


class _Outcomes:
    """pytest plugin: which tests ran, which of them turned red, and what the parity grid called wrong first."""

    def __init__(self) -> None:
        self.red: dict[str, bool] = {}
        self.named: list[str] = []

    def pytest_runtest_logreport(self, report: object) -> None:
        node: str = report.nodeid  # type: ignore[attr-defined]
        if report.when == "call" or report.failed:  # type: ignore[attr-defined]
            self.red[node] = self.red.get(node, False) or bool(report.failed)  # type: ignore[attr-defined]
        self.named += FIRST_WRONG.findall(report.longreprtext)  # type: ignore[attr-defined]


def run_faults(
    faults: Sequence[Fault], jobs: int, done: Callable[[Verdict], None], *, control: bool = False
) -> list[Verdict]:
    """Verdicts of all faults. That the killers are green without a fault is what the test suite shows.

    Args:
        jobs: forks at a time.   done: called with each verdict as it comes.
        control: first see that tests of every kind are green here, without a fault.
    Raises:
        GlmvError: one is not, so that red would mean nothing.
    """
    _warm_up()
    touched = sorted({fault.module for fault in faults} & sys.modules.keys())
    assert not touched, f"imported before a fault could be put in: {touched}"
    verdicts = {}
    with _ranks_at_hand():
        if control and (red := _red_without_a_fault()):
            raise GlmvError(f"without any fault, {', '.join(red)} is red here: no verdict could be trusted.")
        for verdict in _run_all(list(faults), jobs):
            verdicts[verdict.fault] = verdict
            done(verdict)
    return [verdicts[fault.id] for fault in faults]


def _red_without_a_fault() -> list[str]:
    pid, pipe = _fork(CONTROL)
    os.waitpid(pid, 0)
    with os.fdopen(pipe) as results:
        said = results.read()
    _, red, _ = json.loads(said) if said else (1, {}, [])
    return [killer for killer in CONTROL if _is_red(killer, red)]


def _run_all(waiting: list[Fault], jobs: int) -> Iterator[Verdict]:
    running: dict[int, tuple[Fault, int]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            fault = waiting.pop(0)
            try:
                fault.apply(fault.path.read_text(encoding="utf-8"))
            except (DeadFaultError, OSError) as error:
                yield Verdict(fault.id, {}, dead=str(error))
                continue
            pid, pipe = _fork(fault.killers, fault.id)
            running[pid] = (fault, pipe)
        if running:
            pid, _ = os.wait()
            fault, pipe = running.pop(pid)
            with os.fdopen(pipe) as results:
                yield _verdict(fault, results.read())


def _verdict(fault: Fault, said: str) -> Verdict:
    code, red, named = json.loads(said) if said else (1, {}, [])
    if code == NOT_FOUND:
        return Verdict(fault.id, {}, dead=f"one of its killers does not exist: {', '.join(fault.killers)}")
    outcomes = {killer: _is_red(killer, red) for killer in fault.killers}
    located = any(re.search(fault.first, name) for name in named) if fault.first else None
    return Verdict(fault.id, outcomes, named="; ".join(dict.fromkeys(named)), located=located)


def _is_red(killer: str, red: dict[str, bool]) -> bool:
    """A killer without any result could not even be imported, or ended its process: red."""
    cases = [value for node, value in red.items() if node == killer or node.startswith(f"{killer}[")]
    return any(cases) if cases else True


def _fork(killers: Sequence[str], fault: str = "") -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    os.close(reading)
    status = 1
    try:
        os.write(writing, json.dumps(_run_killers(killers, fault)).encode())
        status = 0
    finally:
        os._exit(status)


def _run_killers(killers: Sequence[str], fault: str) -> tuple[int, dict[str, bool], list[str]]:
    import pytest

    from glmv.verify.faults.hook import install_or_refuse

    os.chdir(ROOT)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    if fault:
        os.environ[VARIABLE] = fault
        install_or_refuse()
    outcomes = _Outcomes()
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *killers], plugins=[outcomes])
    return int(code), outcomes.red, outcomes.named


@contextlib.contextmanager
def _ranks_at_hand() -> Iterator[None]:
    """One template for the ranks of all faults' tests; it has not imported what faults go into either."""
    template = Template()
    os.environ[ADDRESS] = template.address
    try:
        yield
    finally:
        del os.environ[ADDRESS]
        template.stop()


def _warm_up() -> None:
    """Import what every test needs and no fault touches: torch and transformers take seconds."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import pytest  # noqa: F401
    import torch.distributed.fsdp  # noqa: F401
    import transformers.models.glm4v_moe.modeling_glm4v_moe  # noqa: F401

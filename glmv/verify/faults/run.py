"""Runs every fault's killer tests with the fault in place, each in a fork of one warm process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from glmv.errors import GlmvError
from glmv.verify.faults.ends import GREEN, RED, Ends, Teller
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


@dataclass(frozen=True)
class Verdict:
    """What the killers said. `outcomes` says of each named killer how it ended (see `glmv.verify.faults.ends`).

    `dead` says why a fault proves nothing: its line is gone, or a killer is. `named` is what the parity grid called
    wrong first, and `located` whether that is the place where the fault sits (None if the fault does not say).
    """

    fault: str
    outcomes: dict[str, str]
    dead: str = ""
    named: str = ""
    located: bool | None = None

    @property
    def good(self) -> bool:
        """All killers turned red."""
        return not self.dead and bool(self.outcomes) and set(self.outcomes.values()) == {RED}


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
        if control and (amiss := _amiss_without_a_fault()):
            raise GlmvError(f"without any fault, {', '.join(amiss)} is not green here: no verdict could be trusted.")
        for verdict in _run_all(list(faults), jobs):
            verdicts[verdict.fault] = verdict
            done(verdict)
    return [verdicts[fault.id] for fault in faults]


def _amiss_without_a_fault() -> list[str]:
    pid, file = _fork(CONTROL)
    os.waitpid(pid, 0)
    ends = _read(file)
    return [f"{killer} ({end})" for killer in CONTROL if (end := ends.of(killer)) != GREEN]


def _run_all(waiting: list[Fault], jobs: int) -> Iterator[Verdict]:
    running: dict[int, tuple[Fault, IO[str]]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            fault = waiting.pop(0)
            try:
                fault.apply(fault.path.read_text(encoding="utf-8"))
            except (DeadFaultError, OSError) as error:
                yield Verdict(fault.id, {}, dead=str(error))
                continue
            pid, file = _fork(fault.killers, fault.id)
            running[pid] = (fault, file)
        if running:
            pid, _ = os.wait()
            fault, file = running.pop(pid)
            yield _verdict(fault, _read(file))


def _verdict(fault: Fault, ends: Ends) -> Verdict:
    if ends.exit_code == NOT_FOUND and not any(map(ends.could_not_import, fault.killers)):
        return Verdict(fault.id, {}, dead=f"one of its killers does not exist: {', '.join(fault.killers)}")
    outcomes = {killer: ends.of(killer) for killer in fault.killers}
    named = list(dict.fromkeys(ends.first_wrong))
    located = any(re.search(fault.first, name) for name in named) if fault.first else None
    return Verdict(fault.id, outcomes, named="; ".join(named), located=located)


def _read(file: IO[str]) -> Ends:
    with file:
        file.seek(0)
        return Ends.read(file)


def _fork(killers: Sequence[str], fault: str = "") -> tuple[int, IO[str]]:
    """A process that runs the killers, and the file in which it says how they end."""
    file = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed by whoever reads it
    pid = os.fork()
    if pid:
        return pid, file
    status = 1
    try:
        _run_killers(killers, fault, lambda said: print(json.dumps(said), file=file, flush=True))
        status = 0
    finally:
        os._exit(status)


def _run_killers(killers: Sequence[str], fault: str, tell: Callable[[dict[str, Any]], None]) -> None:
    import pytest

    from glmv.verify.faults.hook import install_or_refuse

    os.chdir(ROOT)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    if fault:
        os.environ[VARIABLE] = fault
        install_or_refuse()
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    tell({"exit_code": int(pytest.main([*options, *killers], plugins=[Teller(tell)]))})


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

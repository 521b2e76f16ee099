"""Fixtures of every tier."""

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, settings
from torch import Tensor

from glmv.verify.judge import judge as judge_by_law
from spec.numerics import Policy

# Every run draws the same examples, and a slow machine is no failure. `--hypothesis-profile=default` draws others.
settings.register_profile(
    "glmv", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# With a fault in place tests are to fail: nobody waits for the simplest example of it.
settings.register_profile("fault", settings.get_profile("glmv"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("fault" if "GLMV_FAULT" in os.environ else "glmv")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """What a test draws does not depend on which tests ran before it in this process."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def judge() -> Callable[[Mapping[str, Tensor], Callable[[Policy], Mapping[str, Tensor]], torch.dtype], None]:
    """`judge(candidate, law, dtype)`: every tensor of the candidate within budget of the law."""

    def check(candidate, law, dtype):
        __tracebackhide__ = True
        findings = judge_by_law({name: t.detach().cpu() for name, t in candidate.items()}, law, dtype)
        missed = [str(finding) for finding in findings if finding.used > 1]
        if missed:
            pytest.fail("\n".join(missed[:10]))

    return check


@pytest.fixture(scope="session")
def grid_models(tmp_path_factory, process) -> Path:
    """The parity grid's models, written by rank 0 for all."""
    from glmv.verify.grid import machine

    shared = [str(tmp_path_factory.mktemp("grid"))]
    dist.broadcast_object_list(shared)
    directory = Path(shared[0])
    if process.is_main:
        machine.write_models(directory)
    dist.barrier()
    return directory


@pytest.fixture(scope="session")
def grid_law(grid_models):
    from glmv.verify.grid.law import Law

    return functools.cache(lambda routing: Law.read(grid_models / f"hf-{routing}"))


@pytest.fixture
def take_grid_case(grid_models, grid_law, shared_dir, process):
    """`take_grid_case(case)`: all ranks take its step and judge it; fails with what went wrong first."""
    from glmv.verify.grid import machine
    from glmv.verify.grid.asked import lacking
    from glmv.verify.grid.verdict import judge_case, report
    from glmv.verify.trace import Trace

    def take(case):
        __tracebackhide__ = True
        trainer = machine.run(case, grid_models, shared_dir, process)
        if faults := lacking(case, trainer):
            pytest.fail(f"first wrong: layout of the case\n{'; '.join(faults)}", pytrace=False)
        if misses := judge_case(case, grid_law(case.routing), trainer, Trace(shared_dir / "trace"), process):
            pytest.fail(report(case, misses), pytrace=False)

    return take

"""The parity grid: the trainer's step under combinations of parallel features, judged by the law.

Before a merge every pair of choices meets in some case on 4 ranks. `--grid all` runs all combinations, `--grid nightly`
every pair on 8 ranks; a single case of either is run by its name: `--grid all -k 4-hsdp-2x2x1-allgather-...`.
"""

import functools

import pytest
import torch.distributed as dist

from glmv.verify.grid import machine
from glmv.verify.grid.asked import lacking
from glmv.verify.grid.cases import Case, covering, every, rounded
from glmv.verify.grid.law import Law
from glmv.verify.grid.verdict import judge_case, report
from glmv.verify.trace import Trace


def cases_of(grid):
    if grid == "all":
        return [*every(2), *every(4)]
    if grid == "nightly":
        return covering(8)
    exact = covering(4)
    cases = [*exact, *rounded(exact, "fp32", ["exchange", "recompute"]), *rounded(exact, "bf16", ["exchange"])]
    # Neighbours ask the law the same question.
    return sorted(cases, key=lambda case: (case.dtype != "fp64", case.routing, case.loss, case.accumulate))


def pytest_generate_tests(metafunc):
    cases = cases_of(metafunc.config.getoption("--grid"))
    metafunc.parametrize("case", [pytest.param(c, id=c.id, marks=pytest.mark.world_size(c.ranks)) for c in cases])


@pytest.fixture(scope="module")
def models(tmp_path_factory, process):
    """The tiny models, written by rank 0."""
    shared = [str(tmp_path_factory.mktemp("models"))]
    dist.broadcast_object_list(shared)
    directory = machine.Path(shared[0])
    if process.is_main:
        machine.write_models(directory)
    dist.barrier()
    return directory


@pytest.fixture(scope="module")
def law_of(models):
    return functools.cache(lambda routing: Law.read(models / f"hf-{routing}"))


def test_parity(case: Case, models, law_of, shared_dir, process):
    trainer = machine.run(case, models, shared_dir, process)
    assert lacking(case, trainer) == []
    misses = judge_case(case, law_of(case.routing), trainer, Trace(shared_dir / "trace"), process)
    if misses:
        pytest.fail(report(case, misses), pytrace=False)

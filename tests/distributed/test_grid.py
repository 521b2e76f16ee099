"""The parity grid: the trainer's step under combinations of parallel features, judged by the law.

Before a merge every pair of choices meets in some case on 4 ranks. `--grid all` runs all combinations, `--grid nightly`
every pair on 8 ranks; a single case of either is run by its name: `--grid all -k 4-hsdp-2x2x1-allgather-...`.
"""

import pytest

from glmv.verify.grid.cases import covering, every, rounded


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


def test_parity(case, take_grid_case):
    take_grid_case(case)

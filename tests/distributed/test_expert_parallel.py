"""Gradients under expert parallelism are those of the law on the union of the ranks' batches."""

import pytest
from layouts import DTYPES, backward, build, law_of
from rank_cases import CASES

LAYOUTS = {
    "ep4": {"ep": 4},
    "ep2_efsdp2": {"ep": 2},
    "ep2_edp2": {"ep": 2, "efsdp": 1},
    "ep1_efsdp2": {"ep": 1, "efsdp": 2},
}


@pytest.mark.world_size(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_the_union_in_float64(layout, process, tiny_dir, judge):
    model = build(tiny_dir, process, **LAYOUTS[layout])
    said = backward(model, CASES["all_different"], process)
    if process.is_main:
        judge(said, law_of(tiny_dir).of(CASES["all_different"]), DTYPES["fp64"])

"""Gradients under expert parallelism are those of the law on the union of the ranks' batches."""

import pytest
from layouts import DTYPES, ROUTINGS, backward, build, law_of
from rank_cases import CASES

BALANCE = {"enable_ep_balance": True, "ep_balance_plan": {"max_dup_experts_num": 2}}
LAYOUTS = {
    "ep4": {"ep": 4},
    "ep2_efsdp2": {"ep": 2},
    "ep2_edp2": {"ep": 2, "efsdp": 1},
    "ep1_efsdp2": {"ep": 1, "efsdp": 2},
    "ep2_hsdp": {"ep": 2, "shard": 2},
    "allgather": {"ep": 4, "dispatcher": "allgather"},
    "balance": {"ep": 4, "features": BALANCE},
}


@pytest.mark.world_size(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_gradients_are_those_of_the_union_in_float64(layout, routing, process, tiny_dir, judge):
    model = build(tiny_dir, process, routing=routing, **LAYOUTS[layout])
    said = backward(model, CASES["all_different"], process)
    if process.is_main:
        judge(said, law_of(tiny_dir, routing).of(CASES["all_different"]), DTYPES["fp64"])

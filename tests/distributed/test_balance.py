"""Copies of hot experts in the whole model: nothing changes but the load."""

import pytest
import torch
from layouts import BALANCE, backward, build, law_of
from rank_cases import CASES

from glmv.parallel.balance import LoadMeter
from glmv.verify.grid.batches import micro_batch

SETTINGS = {
    "plain": BALANCE,
    "recomputed": BALANCE | {"recompute": True},
    "reentrant": BALANCE | {"recompute": True, "recompute_plan": {"use_reentrant": True}},
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_ranks_that_accumulate_compute_the_law(setting, process, tiny_dir, judge):
    model = build(tiny_dir, process, routing="all_to_first_rank", ep=2, features=SETTINGS[setting])
    said = backward(model, CASES["all_different"], process)
    if process.is_main:
        judge(said, law_of(tiny_dir, "all_to_first_rank").of(CASES["all_different"]), torch.float64)


@pytest.mark.world_size(2)
def test_an_evaluation_between_two_steps_changes_nothing(process, tiny_dir, judge):
    model = build(tiny_dir, process, routing="all_to_first_rank", ep=2, features=BALANCE)
    backward(model, CASES["text_only"], process)
    with torch.no_grad():
        model(**micro_batch("picture").model_inputs())
    said = backward(model, CASES["all_different"], process)
    if process.is_main:
        judge(said, law_of(tiny_dir, "all_to_first_rank").of(CASES["all_different"]), torch.float64)


@pytest.mark.world_size(4)
def test_the_most_loaded_rank_gets_the_mean(process, tiny_dir):
    """All rows are for rank 0's three experts; with two copies each, the others take three quarters of them."""
    model = build(tiny_dir, process, routing="all_to_first_rank", ep=4, features=BALANCE)
    meter = LoadMeter(model)
    backward(model, CASES["all_different"], process)
    before, after = meter.read()
    assert before == 4
    assert after < before / 2
    meter.reset()
    assert not any(dispatcher.loads for dispatcher in meter.dispatchers)


@pytest.mark.world_size(2)
def test_without_balancing_there_is_nothing_to_read(process, tiny_dir):
    assert LoadMeter(build(tiny_dir, process, ep=2)).read() == (None, None)

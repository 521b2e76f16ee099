"""Numbers of experts and ranks that do not fit: refused alike on every rank, or sharded unevenly and right."""

import pytest
import torch
from layouts import BALANCE, backward, build, everyone, law_of
from rank_cases import CASES

from glmv.parallel.process import AgreedError, on_all_ranks
from glmv.tiny.make import make_tiny


def refusal(directory, process, **layout):
    """Collective: what each rank says."""
    with pytest.raises(AgreedError) as caught, on_all_ranks():
        build(directory, process, **layout)
    return set(everyone(str(caught.value)))


@pytest.fixture(scope="module")
def six_experts(process, tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("six") / "tiny", config_overrides={"text_config": {"n_routed_experts": 6}})


@pytest.mark.world_size(4)
def test_experts_that_ranks_do_not_divide_are_refused_everywhere(process, six_experts):
    (said,) = refusal(six_experts, process, ep=4)
    first, second = said.splitlines()
    assert first.startswith("parallel.expert_parallel_size = 4 does not divide the 6 experts of model.language_model.")
    assert second == "Choose 1, 2, 3 or 6."


@pytest.mark.world_size(4)
@pytest.mark.parametrize("layout", [{}, {"ep": 2}, {"ep": 1, "efsdp": 4}], ids=str)
def test_uneven_shards_with_an_empty_one_compute_the_law(layout, process, six_experts, judge):
    """Six experts over four ranks: two, two, two and none."""
    said = backward(build(six_experts, process, **layout), CASES["text_only"], process)
    if process.is_main:
        judge(said, law_of(six_experts).of(CASES["text_only"]), torch.float64)


@pytest.mark.world_size(4)
def test_sizes_that_are_not_the_number_of_ranks_are_refused_everywhere(process, tiny_dir):
    (said,) = refusal(tiny_dir, process, ep=2, efsdp=3)
    assert "expert_parallel_size x expert_fully_shard_parallel_size = 2 x 3 = 6 does not divide" in said


@pytest.mark.world_size(2)
def test_the_npus_exchange_is_refused_elsewhere(process, tiny_dir):
    (said,) = refusal(tiny_dir, process, dtype="bf16", ep=2, dispatcher="mc2")
    assert said.startswith("parallel.ep_plan.dispatcher = mc2: it is an operator of NPUs, and the ranks are on cpu.")


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("layout", "named"),
    [({}, "parallel.expert_parallel_size = 1"), ({"ep": 2, "dispatcher": "allgather"}, "dispatcher = allgather")],
    ids=["alone", "allgather"],
)
def test_copies_without_an_exchange_that_can_make_them_are_refused(layout, named, process, tiny_dir):
    (said,) = refusal(tiny_dir, process, features=BALANCE, **layout)
    assert said.startswith("features.enable_ep_balance = true, but")
    assert named in said

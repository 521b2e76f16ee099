"""The whole model with its experts spread over ranks: gradients are those of the law on the union of their batches."""

from itertools import chain

import pytest
import torch
from layouts import BALANCE, DTYPES, backward, build, everyone, law_of, watch_choices
from rank_cases import CASES

LAYOUTS = {
    "ep4": {"ep": 4},
    "ep2_efsdp2": {"ep": 2},
    "ep2_edp2": {"ep": 2, "efsdp": 1},
    "ep1_efsdp2_edp2": {"ep": 1, "efsdp": 2},
    "ep2_efsdp2_hsdp": {"ep": 2, "shard": 2},
    "allgather": {"ep": 4, "dispatcher": "allgather"},
    "balance": {"ep": 4, "features": BALANCE},
}


def check(layout, routing, names, process, tiny_dir, judge):
    said = backward(build(tiny_dir, process, routing=routing, **LAYOUTS[layout]), names, process)
    if process.is_main:
        judge(said, law_of(tiny_dir, routing).of(names), torch.float64)


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("layout", "routing"),
    [
        *[(layout, "even") for layout in LAYOUTS],
        ("ep4", "all_to_first_rank"),
        ("ep2_edp2", "all_to_last_rank"),
        ("allgather", "all_to_first_rank"),
        ("balance", "one_hot_expert"),
    ],
)
def test_four_ranks_compute_the_law(layout, routing, process, tiny_dir, judge):
    check(layout, routing, CASES["all_different"], process, tiny_dir, judge)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("case", ["text_beside_pictures", "masked_ranks"])
def test_ranks_without_pictures_or_targets_take_part(case, process, tiny_dir, judge):
    check("ep4", "even", CASES[case], process, tiny_dir, judge)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_ranks_that_accumulate_round_no_more_than_one(dtype, dispatcher, process, tiny_dir, judge):
    model = build(tiny_dir, process, dtype=dtype, ep=2, dispatcher=dispatcher, grouped=True)
    choices = watch_choices(model)
    said = backward(model, CASES["all_different"], process)
    choices = [*chain(*everyone(choices))]
    if process.is_main:
        judge(said, law_of(tiny_dir).of(CASES["all_different"], choices), DTYPES[dtype])


@pytest.mark.world_size(2)
def test_routing_weights_and_router_stay_in_fp32(process, tiny_dir):
    seen = {}
    model = build(tiny_dir, process, dtype="bf16", ep=2, grouped=True)
    layer = model.model.language_model.layers[1].mlp
    layer.experts.register_forward_pre_hook(lambda m, args: seen.update(weight=args[2].dtype, experts=args[0].dtype))
    layer.gate.register_forward_pre_hook(lambda m, args: seen.update(router=m.weight.dtype))
    backward(model, CASES["all_different"], process)
    assert seen == {"weight": torch.float32, "experts": torch.bfloat16, "router": torch.float32}
    assert layer.experts.down_proj.grad.dtype == torch.float32


@pytest.mark.world_size(2)
def test_frozen_experts_stay_frozen(process, tiny_dir):
    model = build(tiny_dir, process, ep=2, frozen=["model.language_model.layers.1.mlp.experts"])
    trained = [layer.mlp.experts.down_proj.requires_grad for layer in model.model.language_model.layers[1:]]
    assert trained == [False, True]


@pytest.mark.world_size(4)
def test_a_rank_holds_its_part_of_the_experts(process, tiny_dir):
    weight = build(tiny_dir, process, ep=2).model.language_model.layers[1].mlp.experts.gate_up_proj
    assert weight.shape == (12, 72, 80)
    assert weight.to_local().shape == (6, 36, 80)

"""A checkpoint does not remember how its experts were spread: written under one layout, it is read under any other."""

import pytest
import torch
from layouts import backward, build, law_of
from rank_cases import CASES
from torch.distributed.tensor import DTensor

from glmv.checkpoint.hf_to_dcp import hf_to_dcp
from glmv.checkpoint.training import load_model, load_optimizer, save_checkpoint
from glmv.config.training import TrainingConfig
from glmv.tiny.make import make_tiny
from glmv.train.optimizer import build_optimizer, optimizer_step
from spec.layout import stacked

SAVED = {"ep": 2, "shard": 2}
READ = {
    "ep4": {"ep": 4},
    "ep1": {},
    "hsdp_ep2_edp2": {"shard": 1, "ep": 2, "efsdp": 1},
}
SETTINGS = TrainingConfig(lr=1e-2, weight_decay=0.1)


def whole(tensors):
    """Collective: whole tensors."""
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in tensors.items()}


def state_of(model, optimizer):
    """Collective: weights, buffers and both moments of every parameter, whole."""
    moments = {
        f"{name}.{entry}": value
        for name, parameter in model.named_parameters()
        for entry, value in optimizer.state[parameter].items()
    }
    return whole(model.state_dict()) | whole(moments)


def check_layouts(directory, saved_layout, read_layouts, process, shared_dir):
    """What one layout has trained and saved, the others load to the bit."""
    if process.is_main:
        hf_to_dcp(directory, shared_dir)
    model = build(directory, process, dtype="fp32", **saved_layout)
    optimizer = build_optimizer(model, SETTINGS)
    backward(model, CASES["all_different"], process)
    optimizer_step(optimizer, 1e-2)
    saved = save_checkpoint(shared_dir, 1, model, optimizer, state={}, assets_from=shared_dir / "release")
    kept = state_of(model, optimizer)
    for name, layout in read_layouts.items():
        again = build(directory, process, dtype="fp32", **layout)
        resumed = build_optimizer(again, SETTINGS)
        load_model(again, saved)
        load_optimizer(again, resumed, saved)
        read = state_of(again, resumed)
        assert read.keys() == kept.keys()
        assert [key for key in kept if not torch.equal(kept[key], read[key])] == [], name


@pytest.fixture(scope="module")
def six_experts(process, shared_dir_factory):
    """Over four ranks, the last one holds no expert."""
    directory = shared_dir_factory("six") / "tiny"
    if process.is_main:
        make_tiny(directory, config_overrides={"text_config": {"n_routed_experts": 6}})
    torch.distributed.barrier()
    return directory


@pytest.mark.world_size(4)
def test_a_rank_without_experts_saves_and_loads(process, six_experts, shared_dir):
    check_layouts(six_experts, {}, {"ep2": {"ep": 2}, "hsdp": {"shard": 2}}, process, shared_dir)


@pytest.mark.world_size(4)
def test_weights_and_optimizer_are_bit_equal_under_every_layout(process, tiny_dir, shared_dir):
    check_layouts(tiny_dir, SAVED, READ, process, shared_dir)


@pytest.mark.world_size(4)
def test_a_release_gives_every_layout_the_same_experts(process, tiny_dir, shared_dir):
    """And they differ from one another: no rank loads another's."""
    if process.is_main:
        hf_to_dcp(tiny_dir, shared_dir)
    torch.distributed.barrier()
    published = stacked(dict(law_of(tiny_dir).weights))
    model = build(tiny_dir, process, dtype="fp32", ep=4)
    for parameter in model.parameters():
        parameter.data.fill_(7)
    load_model(model, shared_dir / "release")
    experts = {name: t for name, t in whole(model.state_dict()).items() if ".experts." in name}
    assert len(experts) == 4
    for name, weight in experts.items():
        assert torch.equal(weight, published[name].to(weight.dtype))
        assert len({str(expert.tolist()) for expert in weight}) == len(weight)

"""Stacking experts and splitting them again, element by element."""

import pytest
import torch

from glmv.checkpoint.layout import Slot, expert_slot, split, stack, stacked_shape
from spec import layout as law

PREFIX = "model.language_model.layers.1.mlp.experts."


def hub_experts(experts: int, inner: int, hidden: int, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """Experts in the hub's shapes, every bit pattern different as far as the dtype allows."""
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    named = [(f"{PREFIX}{e}.{part}.weight", shape) for e in range(experts) for part, shape in shapes.items()]
    bits = torch.arange(3 * experts * inner * hidden, dtype=torch.int32).split(inner * hidden)
    if dtype == torch.bfloat16:  # all 65536 patterns, not-a-numbers among them
        bits = [chunk.to(torch.int16).view(torch.bfloat16) for chunk in bits]
    return {name: chunk.to(dtype).view(shape) for (name, shape), chunk in zip(named, bits, strict=True)}


def stacked(weights, key: str) -> torch.Tensor:
    parts = [(slot, tensor) for name, tensor in weights.items() if (slot := expert_slot(name)).key == PREFIX + key]
    experts, (slot, first) = 1 + max(slot.expert for slot, _ in parts), parts[0]
    shape = stacked_shape(slot.part, first.shape, experts)
    return stack(shape, first.dtype, [(slot, lambda t=tensor: t) for slot, tensor in parts])


def test_stacked_shapes():
    weights = hub_experts(experts=2, inner=2, hidden=3)
    assert stacked(weights, "gate_up_proj").shape == (2, 3, 4)
    assert stacked(weights, "down_proj").shape == (2, 2, 3)


def test_every_element_stands_in_its_place():
    weights = hub_experts(experts=2, inner=2, hidden=3)
    gate_up, down = stacked(weights, "gate_up_proj"), stacked(weights, "down_proj")
    for e in range(2):
        for i in range(2):
            for h in range(3):
                assert gate_up[e, h, i] == weights[f"{PREFIX}{e}.gate_proj.weight"][i, h]
                assert gate_up[e, h, 2 + i] == weights[f"{PREFIX}{e}.up_proj.weight"][i, h]
                assert down[e, i, h] == weights[f"{PREFIX}{e}.down_proj.weight"][h, i]


def test_gate_is_the_first_half_and_up_the_second():
    gate, up = torch.full((2, 3), 5.0), torch.full((2, 3), -7.0)
    gate_up = stack((1, 3, 4), up.dtype, [(Slot("k", 0, "up"), lambda: up), (Slot("k", 0, "gate"), lambda: gate)])
    assert gate_up[0, :, :2].unique().tolist() == [5.0]
    assert gate_up[0, :, 2:].unique().tolist() == [-7.0]


@pytest.mark.parametrize(("experts", "inner", "hidden"), [(2, 2, 3), (3, 70, 130), (1, 1, 1), (12, 40, 72)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_splitting_returns_every_original_bit(experts, inner, hidden, dtype):
    weights = hub_experts(experts, inner, hidden, dtype)
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    both = {PREFIX + key: stacked(weights, key) for key in ("gate_up_proj", "down_proj")}
    for name, original in weights.items():
        slot = expert_slot(name)
        assert torch.equal(split(both[slot.key], slot).view(bits), original.view(bits))


def test_stacking_is_the_law():
    weights = hub_experts(experts=3, inner=4, hidden=5)
    expected = law.stacked(weights)
    assert {key: True for key in expected} == {
        key: torch.equal(stacked(weights, key.removeprefix(PREFIX)), tensor) for key, tensor in expected.items()
    }


def test_a_split_matrix_owns_its_memory():
    matrix = split(torch.zeros(2, 3, 4), Slot("k", 1, "up"))
    assert matrix.is_contiguous()
    assert matrix.untyped_storage().nbytes() == matrix.nbytes


@pytest.mark.parametrize(
    "name",
    [
        "model.language_model.layers.0.mlp.gate_proj.weight",
        "model.language_model.layers.1.mlp.shared_experts.gate_proj.weight",
        "model.language_model.layers.1.mlp.gate.weight",
        "model.visual.merger.down_proj.weight",
    ],
)
def test_other_tensors_have_no_slot(name):
    assert expert_slot(name) is None


def test_experts_are_ordered_by_number_not_by_name():
    assert expert_slot(f"{PREFIX}10.up_proj.weight") == Slot(f"{PREFIX}gate_up_proj", 10, "up")

"""AdamW is judged element by element, given the candidate's gradients."""

import dataclasses

import pytest
import torch

from glmv.verify.updates import judge_update
from spec.optimizer import Hyper, State, grad_norm

HYPER = Hyper(lr=1e-2, weight_decay=0.1, clip_grad=1.0)
STEPS = 3


def torch_step():
    """torch's own AdamW in float32: (before, state, gradients, norm, after, state_after)."""
    random = torch.Generator().manual_seed(4)
    p = torch.randn(50, 30, generator=random).requires_grad_()
    optimizer = torch.optim.AdamW([p], lr=HYPER.lr, weight_decay=HYPER.weight_decay)
    snapshots = []
    for _ in range(STEPS):
        p.grad = torch.randn(50, 30, generator=random)
        gradient = {"w": p.grad.clone()}
        norm = torch.nn.utils.clip_grad_norm_([p], HYPER.clip_grad)
        optimizer.step()
        memory = optimizer.state[p]
        state = State(int(memory["step"]), {"w": memory["exp_avg"].clone()}, {"w": memory["exp_avg_sq"].clone()})
        snapshots.append(({"w": p.detach().clone()}, state, gradient, float(norm)))
    (before, state, _, _), (after, state_after, gradients, norm) = snapshots[-2:]
    return before, state, gradients, norm, after, state_after


def used(*step, hyper=HYPER):
    return max(finding.used for finding in judge_update(*step, hyper))


def test_torch_adamw_is_within_ulps():
    assert used(*torch_step()) < 1


@pytest.mark.parametrize(
    "wrong", [{"weight_decay": 0.0}, {"lr": 1.001e-2}, {"beta2": 0.99}, {"eps": 1e-6}, {"clip_grad": 0}]
)
def test_a_wrong_hyper_parameter_is_seen(wrong):
    assert used(*torch_step(), hyper=dataclasses.replace(HYPER, **wrong)) > 2


def test_a_norm_that_misses_a_tensor_is_seen():
    before, state, gradients, norm, after, state_after = torch_step()
    assert used(before, state, gradients, norm * 0.999, after, state_after) > 2


def test_a_buffer_must_not_change():
    before, state, gradients, norm, after, state_after = torch_step()
    changed = {**after, "bias": torch.tensor([1.0001])}
    assert used({**before, "bias": torch.ones(1)}, state, gradients, norm, changed, state_after) > 2


def test_the_norm_is_that_of_all_gradients():
    assert float(grad_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})) == 5

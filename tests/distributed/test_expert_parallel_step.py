"""One optimizer step over both meshes: clipping and AdamW are the law's, given the gradients, to a few ulps."""

import pytest
from layouts import backward, build, gradients_of
from rank_cases import CASES

from glmv.config.training import TrainingConfig
from glmv.parallel.grad_norm import clip_grad_norm
from glmv.train.optimizer import build_optimizer, optimizer_step
from glmv.verify.updates import judge_update
from spec.layout import per_expert
from spec.optimizer import Hyper, State

HYPER = Hyper(lr=1e-2, weight_decay=0.1, clip_grad=0.05)


def whole(model, tensor_of=lambda parameter: parameter):
    """Collective: something of every parameter under published names."""
    return per_expert({name: tensor_of(p).detach().full_tensor().clone() for name, p in model.named_parameters()})


@pytest.mark.world_size(4)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("layout", [{"ep": 2, "shard": 2}, {"ep": 4}], ids=str)
def test_every_parameter_is_stepped_as_the_law_says(layout, fused, process, tiny_dir):
    model = build(tiny_dir, process, dtype="fp32", grouped=True, **layout)
    optimizer = build_optimizer(model, TrainingConfig(adam_fused=fused, weight_decay=HYPER.weight_decay))
    before = whole(model)
    backward(model, CASES["all_different"], process)
    gradients = gradients_of(model)
    norm = float(clip_grad_norm(model.parameters(), HYPER.clip_grad))
    optimizer_step(optimizer, HYPER.lr)
    moments = [whole(model, lambda p, entry=entry: optimizer.state[p][entry]) for entry in ("exp_avg", "exp_avg_sq")]
    findings = judge_update(before, State.zeros(before), gradients, norm, whole(model), State(1, *moments), HYPER)
    assert [str(finding) for finding in findings if not finding.used <= 1] == []
    assert norm > HYPER.clip_grad

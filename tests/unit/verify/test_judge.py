"""The judge sees what it must, and stays silent about healthy rounding."""

import pytest
import torch

from glmv.verify.judge import ALL, Noise, compare, judge, mean_projection
from spec.numerics import Policy, linear

X = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
W = torch.randn(40, 96, generator=torch.Generator().manual_seed(2))


def law(policy):
    weight = policy.widen(W).requires_grad_()
    output = linear(policy.enter(X), weight, None, policy)
    (gradient,) = torch.autograd.grad(policy.widen(output).tanh().sum(), weight)
    return {"output": output.detach(), "weight.grad": gradient}


def used(change, dtype=torch.float32):
    candidate = law(Policy(dtype))
    candidate["weight.grad"] = change(candidate["weight.grad"].clone())
    return max(finding.used for finding in judge(candidate, law, dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_twenty_healthy_seeds_raise_no_alarm(dtype):
    for seed in range(100, 120):
        assert max(finding.used for finding in judge(law(Policy(dtype, draw=seed)), law, dtype)) < 1


FAULTS = {
    "halved": lambda g: g / 2,
    "scaled by 3 %": lambda g: g * 1.03,
    "rolled": lambda g: g.roll(1, 0),
    "one element": lambda g: g.index_put((torch.tensor(3), torch.tensor(5)), g.abs().max()),
    "a row lost": lambda g: g.index_fill(0, torch.tensor([7]), 0),
    "nan": lambda g: g.index_fill(0, torch.tensor([7]), torch.nan),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_far_over_budget(fault, dtype):
    assert used(FAULTS[fault], dtype) > 2


def test_the_worst_element_is_named():
    candidate = law(Policy(torch.float32))
    candidate["output"][3, 17] += 1
    worst = judge(candidate, law, torch.float32)[0]
    assert (worst.name, worst.where) == ("output", "[3, 17]")


def test_a_wrong_divisor_shows_in_all_tensors_together():
    candidate = {name: t * 1.01 for name, t in law(Policy(torch.float32)).items()}
    findings = {finding.name: finding for finding in judge(candidate, law, torch.float32)}
    assert findings[ALL].used > 100


def test_an_exactly_zero_truth_allows_nothing():
    truth = {"a": torch.ones(3), "b": torch.zeros(3)}
    candidate = {"a": torch.ones(3), "b": torch.tensor([0, 1e-30, 0])}
    worst = compare(candidate, truth, Noise(), torch.float32)[0]
    assert (worst.name, worst.figure, worst.used) == ("b", "exact zero", float("inf"))


def test_a_cancelled_truth_is_judged_against_its_class():
    truth = {"a.bias": torch.ones(3), "b.bias": torch.full((3,), 1e-17)}
    candidate = {"a.bias": torch.ones(3), "b.bias": torch.full((3,), 1e-8)}
    assert compare(candidate, truth, Noise(), torch.float32)[0].used < 1


def test_a_comparison_that_could_not_fail_is_refused():
    zeros = {"a": torch.zeros(3)}
    with pytest.raises(ValueError, match="could not fail"):
        compare(zeros, zeros, Noise(), torch.float32)


def test_missing_tensors_are_refused():
    with pytest.raises(KeyError, match="weight"):
        compare({"a": X}, {"a": X, "weight": W}, Noise(), torch.float32)


def test_a_scale_that_one_step_cannot_show_shows_in_the_mean_of_many():
    random = torch.Generator().manual_seed(0)
    draws, healthy = (3e-3 * torch.randn(2, 20, generator=random)).tolist()
    assert mean_projection(healthy, draws, torch.bfloat16).used < 1
    assert mean_projection([1.01 * (1 + p) - 1 for p in healthy], draws, torch.bfloat16).used > 2

import math

import pytest
import torch
from torch import nn

from glmv.parallel.grad_norm import clip_grad_norm, total_norm


def parameters(*gradients, dtype=torch.float32):
    made = [nn.Parameter(torch.zeros(len(g), dtype=dtype)) for g in gradients]
    for parameter, gradient in zip(made, gradients):
        parameter.grad = torch.tensor(gradient, dtype=dtype)
    return made


# A 3-4-12-13 box: every norm is an integer, so equality is exact.
BOX = ([3.0, 0.0], [4.0], [0.0, -12.0, 0.0])


def test_the_norm_is_that_of_all_gradients_as_one_vector():
    assert total_norm(parameters(*BOX)) == 13


def test_the_inf_norm_is_the_largest_magnitude():
    assert total_norm(parameters(*BOX), math.inf) == 12


def test_max_norm_zero_only_measures():
    made = parameters(*BOX)
    assert clip_grad_norm(made, 0.0) == 13
    assert [p.grad.tolist() for p in made] == [list(g) for g in BOX]


@pytest.mark.parametrize("foreach", [True, False])
def test_a_norm_above_the_limit_scales_every_gradient(foreach):
    made = parameters(*BOX, dtype=torch.float64)
    clip_grad_norm(made, 6.5, foreach=foreach)
    scale = 6.5 / (13 + 1e-6)
    assert [p.grad.tolist() for p in made] == [[x * scale for x in g] for g in BOX]


def test_a_norm_below_the_limit_leaves_gradients_bit_equal():
    made = parameters([0.1, 0.3], [0.7])
    before = [p.grad.clone() for p in made]
    clip_grad_norm(made, 100.0)
    assert all(torch.equal(p.grad, b) for p, b in zip(made, before))


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_empty_lists_missing_and_empty_gradients_count_as_nothing(norm_type):
    assert clip_grad_norm([], 1.0, norm_type) == 0
    assert clip_grad_norm([nn.Parameter(torch.ones(2))], 1.0, norm_type) == 0
    assert clip_grad_norm(parameters([]), 1.0, norm_type) == 0


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_single_bad_value_makes_the_norm_non_finite(bad, norm_type):
    assert not total_norm(parameters([1.0, bad], [2.0]), norm_type).isfinite()


def test_a_bad_norm_leaves_the_other_gradients_as_they_are():
    made = parameters([1.0, math.nan], [2.0, 3.0])
    assert clip_grad_norm(made, 0.5).isnan()
    assert made[1].grad.tolist() == [2.0, 3.0]


def test_bf16_gradients_are_measured_in_fp32():
    norm = total_norm(parameters([1.0] * 1024, dtype=torch.bfloat16))
    assert norm.dtype == torch.float32
    assert norm == 32

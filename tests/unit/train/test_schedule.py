import math
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glmv.train.schedule import Schedule
from spec.optimizer import Schedule as LawSchedule
from spec.optimizer import learning_rate

# cos(pi * p) where it is a rational number, so that the expected value can be written down without a cosine.
HALF = Fraction(1, 2)
COSINES = {Fraction(0): 1, Fraction(1, 3): HALF, HALF: 0, Fraction(2, 3): -HALF, Fraction(1): -1}


def close(value, exact):
    """Within two roundings at the size of the peak learning rate, which the sum passes through."""
    return abs(Fraction(value) - exact) <= 2 * Fraction(math.ulp(1.0))


def test_upstream_example_of_a_cosine_with_warmup():
    schedule = Schedule(train_iters=10, lr=1.0, style="cosine", warmup_ratio=0.4, lr_min=0.5)
    exact = {0: 0, 1: 0.25, 2: 0.5, 3: 0.75, 4: 1, 6: Fraction(7, 8), 7: Fraction(3, 4), 8: Fraction(5, 8), 10: 0.5}
    assert [n for n, e in exact.items() if not close(schedule.lr_at(n), Fraction(e))] == []


@pytest.mark.parametrize("progress", COSINES)
def test_cosine(progress):
    schedule = Schedule(train_iters=12, lr=1.0, style="cosine", lr_min=0.25)
    exact = Fraction(1, 4) + Fraction(3, 4) * (1 + COSINES[progress]) / 2
    assert close(schedule.lr_at(int(12 * progress)), exact)


@pytest.mark.parametrize("step", range(13))
def test_linear_reaches_lr_min_at_the_end_of_the_decay_and_stays(step):
    schedule = Schedule(train_iters=12, lr=1.0, style="linear", lr_min=0.5, decay_ratio=0.5)
    assert close(schedule.lr_at(step), Fraction(1, 2) + Fraction(max(6 - step, 0), 12))


@pytest.mark.parametrize("step", range(6))
def test_constant_after_a_warmup_from_lr_start(step):
    schedule = Schedule(train_iters=8, lr=1.0, warmup_ratio=0.5, lr_start=0.5, lr_min=0.25, decay_ratio=0.5)
    assert schedule.lr_at(step) == min(1.0, 0.5 + step / 8)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("train_iters", [1, 2, 10])
@pytest.mark.parametrize("warmup_ratio", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("decay_ratio", [0.0, 0.3, 1.0])
def test_every_corner_has_a_rate_within_bounds_and_learns_something(style, train_iters, warmup_ratio, decay_ratio):
    schedule = Schedule(train_iters, 1.0, style, warmup_ratio, decay_ratio, lr_min=0.125)
    rates = [schedule.lr_at(n) for n in range(train_iters)]
    assert all(0 <= rate <= 1 for rate in rates)
    assert max(rates) > 0


def test_a_warmup_longer_than_the_decay_goes_straight_to_lr_min():
    schedule = Schedule(train_iters=10, lr=1.0, style="cosine", warmup_ratio=0.5, decay_ratio=0.2, lr_min=0.25)
    assert [schedule.lr_at(n) for n in (4, 5, 9)] == [0.8, 0.25, 0.25]


def test_a_single_step_is_not_spent_on_a_warmup_at_rate_zero():
    assert Schedule(train_iters=1, lr=0.5, warmup_ratio=1.0).lr_at(0) == 0.5


@given(
    train_iters=st.integers(1, 60),
    style=st.sampled_from(["constant", "linear", "cosine"]),
    warmup_ratio=st.floats(0, 1),
    decay_ratio=st.floats(0, 1),
)
def test_every_step_has_the_rate_of_the_law(train_iters, style, warmup_ratio, decay_ratio):
    mine = Schedule(train_iters, 1e-3, style, warmup_ratio, decay_ratio, 1e-5, 1e-4)
    law = LawSchedule(1e-3, train_iters, 1e-4, 1e-5, warmup_ratio, style, decay_ratio)
    # Two orders of a handful of float operations.
    roundings = 8 * sys.float_info.epsilon * 1e-3
    for step in range(train_iters):
        assert abs(mine.lr_at(step) - learning_rate(step, law)) <= roundings

"""An expert choice may differ only where scores are closer than their noise."""

import dataclasses

import torch

from glmv.verify.routing import RoutingNoise, ScoreNoise, judge_margins, judge_share, score_noise
from spec.router import Routing

TOKENS = 300
TRUTH = Routing(
    top_k_index_TK=torch.tensor([[2, 1]] * TOKENS),
    top_k_weight_TK=torch.ones(TOKENS, 2),
    choice_TE=torch.tensor([[0.1, 0.5, 0.9, 0.3]] * TOKENS, dtype=torch.float64),
)
REAL = torch.ones(TOKENS, dtype=torch.bool)
ERROR = 1e-3


def noise():
    found = RoutingNoise()
    moved = TRUTH.choice_TE + ERROR * torch.randn(TOKENS, 4, generator=torch.Generator().manual_seed(0))
    found.add(score_noise({1: TRUTH}, {1: dataclasses.replace(TRUTH, choice_TE=moved)}, REAL))
    return found


def used(choice, truth=TRUTH, real=REAL):
    own = RoutingNoise()
    own.add({1: ScoreNoise(ERROR, 0, TOKENS)})
    return next(judge_margins({1: choice}, {1: truth}, own, noise(), real, torch.float32)).used


def choose(token, experts):
    choice = TRUTH.top_k_index_TK.clone()
    choice[token] = torch.tensor(experts)
    return choice


def test_the_same_set_in_another_order_is_the_same_choice():
    assert used(TRUTH.top_k_index_TK.flip(-1)) == 0


def test_another_expert_is_seen():
    assert used(choose(7, [2, 3])) > 10


def test_a_near_tie_may_fall_either_way():
    tied = TRUTH.choice_TE.clone()
    tied[7, 3] = 0.5 - ERROR
    assert 0 < used(choose(7, [2, 3]), dataclasses.replace(TRUTH, choice_TE=tied)) < 1


def test_an_expert_chosen_twice_is_seen():
    assert used(choose(0, [2, 2])) == float("inf")


def test_padding_is_not_judged():
    real = REAL.clone()
    real[5] = False
    assert used(choose(5, [0, 3]), real=real) == 0


def test_one_token_may_differ_but_not_many():
    assert judge_share(1, flips=1, tokens=TOKENS, own_share=0.0, noise=noise()).used == 1
    assert judge_share(1, flips=20, tokens=TOKENS, own_share=0.0, noise=noise()).used > 10


def test_a_step_of_near_ties_may_differ_as_its_draws_do():
    assert judge_share(1, flips=20, tokens=TOKENS, own_share=0.05, noise=noise()).used < 1


def test_noise_is_measured_on_real_tokens():
    assert ERROR / 2 < noise().level(1) < ERROR * 2
    assert noise().share(1) == 0

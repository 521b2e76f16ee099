"""An expert choice may differ only where scores are closer than their noise."""

import torch

from glmv.verify.routing import judge_choice
from spec.router import Routing

SCORES = torch.tensor([[0.1, 0.5, 0.9, 0.3]] * 300, dtype=torch.float64)
TRUTH = {1: Routing(torch.tensor([[2, 1]] * 300), torch.ones(300, 2), SCORES)}
REAL = torch.ones(300, dtype=torch.bool)


def used(choice, scores=SCORES, dtype=torch.float32, noise=1e-7):
    truth = {1: Routing(TRUTH[1].top_k_index_TK, TRUTH[1].top_k_weight_TK, scores)}
    return max(f.used for f in judge_choice({1: choice}, truth, {1: noise}, REAL, dtype))


def test_the_same_set_in_another_order_is_the_same_choice():
    assert used(torch.tensor([[1, 2]] * 300)) == 0


def test_another_expert_is_seen():
    choice = torch.tensor([[2, 1]] * 300)
    choice[7] = torch.tensor([2, 3])
    assert used(choice) > 1000


def test_a_near_tie_may_fall_either_way_but_not_often():
    scores, choice = SCORES.clone(), torch.tensor([[2, 1]] * 300)
    scores[:, 3] = 0.5 - 1e-7
    choice[7] = torch.tensor([2, 3])
    assert used(choice, scores) <= 1
    choice[:100] = torch.tensor([2, 3])
    assert used(choice, scores) > 1


def test_an_expert_chosen_twice_is_seen():
    choice = torch.tensor([[2, 1]] * 300)
    choice[0] = torch.tensor([2, 2])
    assert used(choice) > 1


def test_padding_is_not_judged():
    choice = torch.tensor([[2, 1]] * 300)
    choice[5] = torch.tensor([0, 3])
    real = REAL.clone()
    real[5] = False
    assert all(f.used <= 1 for f in judge_choice({1: choice}, TRUTH, {1: 1e-7}, real, torch.float32))

"""What an error of the gradients looks like."""

import torch

from glmv.verify.explain import explain

random = torch.Generator().manual_seed(0)
BY_RANK = {rank: {"w": torch.randn(8, 5, generator=random, dtype=torch.float64)} for rank in range(4)}
TRUTH = {"w": sum(part["w"] for part in BY_RANK.values())}


def test_a_lost_rank_is_named():
    candidate = {"w": TRUTH["w"] - BY_RANK[2]["w"]}
    assert explain(candidate, TRUTH, BY_RANK) == "rank 2's gradient counts 0.00 times"


def test_a_doubled_rank_is_named():
    candidate = {"w": TRUTH["w"] + BY_RANK[1]["w"]}
    assert explain(candidate, TRUTH, BY_RANK) == "rank 1's gradient counts 2.00 times"


def test_a_divisor_is_named():
    assert "0.250 times" in explain({"w": TRUTH["w"] / 4}, TRUTH, BY_RANK)


def test_an_error_of_another_kind_is_not_explained_away():
    assert explain({"w": TRUTH["w"].roll(1, 0)}, TRUTH, BY_RANK) == ""

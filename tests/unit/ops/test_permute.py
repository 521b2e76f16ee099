import pytest
import torch

from glmv.ops.permute import count_tokens, expert_order, to_experts


@pytest.mark.parametrize("experts", [2, 8, 128, 160])
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_counts(experts, tokens):
    index_TK = torch.randint(experts, (tokens, 3), generator=torch.Generator().manual_seed(experts))
    expected = [int((index_TK == expert).sum()) for expert in range(experts)]
    counts = count_tokens(index_TK, experts)
    assert counts.dtype == torch.int64
    assert counts.tolist() == expected


def test_all_tokens_on_the_last_expert():
    assert count_tokens(torch.full((5, 1), 127), 128).tolist() == [0] * 127 + [5]


def test_rows_of_one_expert_stay_in_token_order():
    index_TK = torch.tensor([[1, 0], [0, 1], [1, 2], [0, 2]])
    order_R, _ = expert_order(index_TK)
    assert order_R.tolist() == [1, 2, 6, 0, 3, 4, 5, 7]


def test_to_experts_copies_each_token_to_its_places():
    index_TK = torch.tensor([[1, 0], [0, 1], [1, 2]])
    hidden_TH = torch.arange(3.0)[:, None]
    rows = to_experts(hidden_TH, *expert_order(index_TK), 2)
    assert rows.flatten().tolist() == [0, 1, 0, 1, 2, 2]


def test_gradients_are_those_of_indexing():
    index_TK = torch.tensor([[1, 0], [0, 1], [1, 2]])
    order = expert_order(index_TK)
    hidden_TH = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: to_experts(x, *order, 2), hidden_TH)

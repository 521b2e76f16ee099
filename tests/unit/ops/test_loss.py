import pytest
import torch
from op_cases import DTYPES, draw, leaf

from glmv.ops.loss import count_targets, token_cross_entropy
from spec import loss as law_loss

LABELS = torch.tensor([[5, -100, 3, 0, -100], [-100, -100, 9, 9, 2]])
TARGETS = law_loss.next_token_targets(LABELS, torch.zeros_like(LABELS))
LOGITS = draw(2, 5, 11)


def law(policy):
    logits = leaf(LOGITS, policy.wide)
    value = law_loss.cross_entropy(policy.enter(logits), TARGETS, TARGETS.ne(law_loss.IGNORED).double(), policy)
    value.backward()
    return {"loss": value.detach(), "logits": logits.grad}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_of_cross_entropy_and_its_gradient(dtype, judge):
    logits = leaf(LOGITS, dtype)
    loss = token_cross_entropy(logits, LABELS)
    loss.backward()
    judge({"loss": loss, "logits": logits.grad}, law, dtype)


def test_the_sum_is_never_narrower_than_fp32():
    assert token_cross_entropy(LOGITS.bfloat16(), LABELS).dtype == torch.float32
    assert token_cross_entropy(LOGITS, LABELS).dtype == torch.float64


@pytest.mark.parametrize("length", [5, 1])
def test_nothing_to_learn_is_zero_with_zero_gradients(length):
    logits = leaf(LOGITS[:, :length], torch.float32)
    loss = token_cross_entropy(logits, torch.full((2, length), -100))
    loss.backward()
    assert loss == 0
    assert logits.grad.eq(0).all()


def test_count_targets():
    assert count_targets(LABELS).item() == law_loss.count_targets([(LABELS, torch.zeros_like(LABELS))]) == 5
    assert count_targets(torch.full((2, 4), -100)).item() == 0


def test_the_first_label_is_nobodys_target():
    labels = torch.tensor([[7, -100, -100]])
    assert count_targets(labels).item() == 0
    assert token_cross_entropy(LOGITS[:1, :3], labels) == 0

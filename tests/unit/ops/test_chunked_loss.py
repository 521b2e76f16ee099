import pytest
import torch
from op_cases import DTYPES, draw, leaf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from glmv.model.head import Head
from glmv.ops.chunked_loss import ChunkSize, Targets, chunked_cross_entropy
from glmv.ops.loss import Objective, cross_entropy, shares, shift, unpredictable_ignored
from spec import loss as law_loss
from spec.loss import LOSS_TYPES
from spec.numerics import linear

HIDDEN, VOCABULARY, LENGTH = 16, 53, 37
SEEN = [i * 7 % VOCABULARY for i in range(LENGTH)]
UNSEEN = [-100] * LENGTH
# Documents and labels of every row.
CASES = {
    "padded": ([[0] * 30 + [-1] * 7, [-1] * 4 + [0] * 33], [SEEN, SEEN]),
    "packed": ([[0] * 12 + [1] + [2] * 9 + [3] * 10 + [-1] * 5], [SEEN]),
    "masked_middle": ([[0] * LENGTH], [SEEN[:9] + UNSEEN[:19] + SEEN[-9:]]),
    "one_target": ([[0] * LENGTH] * 2, [UNSEEN, [*UNSEEN[:-1], 8]]),
}
NOTHING = {
    "no_targets": ([[0] * LENGTH], [UNSEEN]),
    "nothing_real": ([[-1] * LENGTH], [SEEN]),
}
SIZES = {
    "static_1": ChunkSize(1, per_row=True),
    "static_7": ChunkSize(7, per_row=True),
    "static_beyond": ChunkSize(1024, per_row=True),
    "dynamic_1": ChunkSize(1, per_row=False),
    "dynamic_10": ChunkSize(10, per_row=False),
}


def tensors(name):
    documents, labels = map(torch.tensor, (CASES | NOTHING)[name])
    return documents, unpredictable_ignored(labels, documents)


def objective(loss_type):
    """Of a step of three micro-batches, which have 50 targets between them."""
    return Objective(loss_type, targets=50, micro_batches=3)


def targets(name, loss_type="default", size=SIZES["static_7"]):
    documents, labels = tensors(name)
    return Targets(shift(labels), shares(labels, documents, objective(loss_type)), size.tokens(len(labels)))


def inputs(name, dtype):
    rows, length = tensors(name)[0].shape
    return leaf(draw(rows, length, HIDDEN), dtype), leaf(draw(VOCABULARY, HIDDEN, seed=1), dtype)


def said(loss, hidden, weight):
    return {"loss": loss, "hidden": hidden.grad, "lm_head.weight": weight.grad}


def machine(name, loss_type="default", size=SIZES["static_7"], dtype=torch.float64, scale=1.0):
    hidden, weight = inputs(name, dtype)
    loss = chunked_cross_entropy(hidden, weight, targets(name, loss_type, size))
    (loss * scale).backward()
    return said(loss.detach(), hidden, weight)


def law(name, loss_type="default", scale=1.0):
    def law(policy):
        (documents, _), labels = tensors(name), torch.tensor(CASES[name][1])
        step, target = objective(loss_type), law_loss.next_token_targets(labels, documents)
        share = law_loss.shares(target, documents, loss_type, step.targets, step.micro_batches)
        hidden, weight = inputs(name, policy.wide)
        logits = linear(policy.enter(hidden), policy.enter(weight), None, policy)
        loss = law_loss.cross_entropy(logits, target, share, policy)
        (loss * scale).backward()
        return said(loss.detach(), hidden, weight)

    return law


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_in_chunks(name, size, loss_type, dtype, judge):
    judge(machine(name, loss_type, SIZES[size], dtype), law(name, loss_type), dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NOTHING)
def test_nothing_to_learn_is_zero_with_zero_gradients(name, size):
    assert [tensor.count_nonzero() for tensor in machine(name, size=SIZES[size]).values()] == [0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_done_to_the_loss_is_done_to_its_gradients(dtype, judge):
    judge(machine("packed", dtype=dtype, scale=-0.25), law("packed", scale=-0.25), dtype)


def test_a_second_backward_pass_adds_the_same():
    hidden, weight = inputs("packed", torch.float64)
    loss = chunked_cross_entropy(hidden, weight, targets("packed")) * 0.25
    loss.backward(retain_graph=True)
    once = hidden.grad.clone(), weight.grad.clone()
    loss.backward()
    assert hidden.grad.equal(2 * once[0])
    assert weight.grad.equal(2 * once[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed(reentrant, judge):
    hidden, weight = inputs("packed", torch.float64)
    loss = checkpoint(chunked_cross_entropy, hidden, weight, targets("packed"), use_reentrant=reentrant)
    loss.backward()
    judge(said(loss, hidden, weight), law("packed"), torch.float64)


def test_the_weights_gradient_is_summed_in_fp32():
    """Every chunk of one token adds 1/512 of the first chunk's gradient: in bf16 it would vanish in the sum."""
    tokens = 513
    hidden, weight = torch.ones(1, tokens, 1, dtype=torch.bfloat16), leaf(torch.zeros(2, 1), torch.bfloat16)
    share = torch.tensor([[1.0] + [1 / 512] * (tokens - 1)]).double()
    chunked_cross_entropy(hidden, weight, Targets(torch.zeros(1, tokens).long(), share, 1)).backward()
    assert weight.grad.tolist() == [[-1.0], [1.0]]


def test_shares_are_not_rounded_to_the_compute_dtype():
    hidden, weight = torch.zeros(1, 1, 4, dtype=torch.bfloat16), torch.zeros(2, 4, dtype=torch.bfloat16)
    third = torch.full((1, 1), 1 / 3).double()
    loss = chunked_cross_entropy(hidden, weight, Targets(torch.zeros(1, 1).long(), third, 1))
    assert loss == third.float() * -torch.zeros(2).log_softmax(-1)[0]


def test_the_sum_is_never_narrower_than_fp32():
    kinds = [machine("packed", dtype=dtype)["loss"].dtype for dtype in DTYPES]
    assert kinds == [torch.float64, torch.float32, torch.float32]


class Operators(TorchDispatchMode):
    """Counts results by their number of elements, and matrix products."""

    def __init__(self):
        super().__init__()
        self.largest, self.products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() // t.element_size() for t in tree_leaves(result) if torch.is_tensor(t)]
        self.largest = max([self.largest, *sizes])
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return result


def count(loss_of, name="packed", frozen=()):
    """What loss and gradients take; `frozen` of 0 the hidden states, 1 the weight."""
    leaves = inputs(name, torch.float32)
    for index in frozen:
        leaves[index].requires_grad_(False)
    with Operators() as counted:
        loss = loss_of(*leaves)
        if loss.requires_grad:
            loss.backward()
    assert [leaf.grad is None for leaf in leaves] == [index in frozen for index in range(2)]
    return counted


def whole(hidden, weight):
    documents, labels = tensors("packed")
    share = shares(labels, documents, objective("default"))
    return cross_entropy(nn.functional.linear(hidden, weight), labels, share)


@pytest.mark.parametrize("tokens", [1, 7, 20])
def test_no_logits_beyond_a_chunks_ever_exist(tokens):
    size = ChunkSize(tokens, per_row=True)
    counted = count(lambda *leaves: chunked_cross_entropy(*leaves, targets("packed", size=size)))
    assert counted.largest == max(tokens * VOCABULARY, VOCABULARY * HIDDEN)
    assert count(whole).largest == LENGTH * VOCABULARY


def products(name, frozen=(), size=SIZES["dynamic_10"]):
    return count(lambda *leaves: chunked_cross_entropy(*leaves, targets(name, size=size)), name, frozen).products


def test_what_is_frozen_costs_no_products():
    # Four chunks of the 37 tokens, each one product for the logits and one for each gradient.
    assert [products("packed", frozen) for frozen in [(), (0,), (1,), (0, 1)]] == [12, 8, 8, 4]


def test_no_gradients_are_made_where_none_are_wanted():
    with torch.no_grad():
        leaves = inputs("packed", torch.float32)
        with Operators() as counted:
            loss = chunked_cross_entropy(*leaves, targets("packed", size=SIZES["dynamic_10"]))
    assert (loss.requires_grad, counted.products) == (False, 4)


def test_chunks_without_targets_are_left_out():
    # Targets stand at positions 0 to 7 and 27 to 35: chunks of 10 begin at 0, 20 and 30.
    assert products("masked_middle") == 9
    assert products("no_targets") == 0


def test_how_many_tokens_a_chunk_has():
    assert ChunkSize(1024, per_row=True).tokens(rows=3) == 3072
    assert ChunkSize(4096, per_row=False).tokens(rows=3) == 4096


def test_targets_of_another_shape_are_refused():
    hidden, weight = inputs("packed", torch.float32)
    with pytest.raises(ValueError, match=r"\(1, 36, 16\), targets \(1, 37\) and shares \(1, 37\) differ in shape"):
        chunked_cross_entropy(hidden[:, 1:], weight, targets("packed"))


def test_a_head_gives_logits_or_their_loss():
    head, (hidden, weight) = Head(HIDDEN, VOCABULARY, bias=False), inputs("packed", torch.float32)
    head.load_state_dict({"weight": weight})
    logits, loss = head(hidden), head(hidden, targets("packed"))
    assert logits.equal(nn.functional.linear(hidden, weight))
    assert loss.equal(chunked_cross_entropy(hidden, weight, targets("packed")))

import pytest
import torch
from op_cases import DTYPES, draw, leaf

from glmv.ops.documents import document_ids
from glmv.ops.loss import Objective, count_targets, cross_entropy, shares, shift, unpredictable_ignored
from spec import loss as law_loss
from spec.loss import LOSS_TYPES

VOCABULARY = 11
# Documents and labels of a step's micro-batches, of unlike numbers of targets; labels stand where nobody predicts, too.
PADDED = [[0, 0, 0, 0, -1], [-1, -1, 0, 0, 0]]
PACKED = [[0, 0, 0, 1, 1, 2, 3, 3, 3, -1]]
MICRO_BATCHES = {
    "padded": (PADDED, [[5, -100, 3, 0, 7], [7, 7, 9, 9, 2]]),
    "packed": (PACKED, [[4, 4, 1, 2, -100, 3, 6, 6, 6, 6]]),
    "one_target": ([[0] * 4], [[-100, -100, -100, 8]]),
    "no_targets": ([[0] * 4, [0] * 3 + [-1]], [[8, -100, -100, -100], [-100] * 4]),
    "nothing_real": ([[-1] * 4], [[3] * 4]),
}
UNEVEN = {f"{n}_targets": ([[0] * 51], [[-100] + [n % 7] * n + [-100] * (50 - n)]) for n in (1, 3, 10, 50)}
MICRO_BATCHES |= UNEVEN
STEPS = {
    "everything": [*MICRO_BATCHES],
    "uneven_targets": [*UNEVEN],
    "padded_beside_packed": ["padded", "packed"],
    "packed": ["packed"],
}


def tensors(name):
    return (torch.tensor(part) for part in MICRO_BATCHES[name])


def logits(name):
    return draw(*torch.tensor(MICRO_BATCHES[name][1]).shape, VOCABULARY, seed=len(name))


def objective(names, loss_type):
    labelled = [tensors(name) for name in names]
    targets = law_loss.count_targets([(labels, documents) for documents, labels in labelled])
    return Objective(loss_type, targets, len(names))


def machine(names, loss_type, dtype):
    """Sum of the losses, and every micro-batch's gradient."""
    said = {"loss": 0}
    for name in names:
        documents, labels = tensors(name)
        labels, own = unpredictable_ignored(labels, documents), leaf(logits(name), dtype)
        loss = cross_entropy(own, labels, shares(labels, documents, objective(names, loss_type)))
        loss.backward()
        said |= {"loss": said["loss"] + loss.detach(), name: own.grad}
    return said


def law(names, loss_type):
    def law(policy):
        said = {"loss": 0}
        for name in names:
            (documents, labels), step = tensors(name), objective(names, loss_type)
            target, own = law_loss.next_token_targets(labels, documents), leaf(logits(name), policy.wide)
            share = law_loss.shares(target, documents, loss_type, step.targets, step.micro_batches)
            loss = law_loss.cross_entropy(policy.enter(own), target, share, policy)
            loss.backward()
            said |= {"loss": said["loss"] + loss.detach(), name: own.grad}
        return said

    return law


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("step", STEPS)
def test_loss_of_a_step_and_its_gradients(step, loss_type, dtype, judge):
    judge(machine(STEPS[step], loss_type, dtype), law(STEPS[step], loss_type), dtype)


@pytest.mark.parametrize("name", MICRO_BATCHES)
def test_labels_that_nobody_predicts_are_ignored(name):
    documents, labels = tensors(name)
    mine = shift(unpredictable_ignored(labels, documents))
    assert mine.equal(law_loss.next_token_targets(labels, documents))


def share(name, loss_type, micro_batches=1):
    documents, labels = tensors(name)
    labels = unpredictable_ignored(labels, documents)
    return shares(labels, documents, Objective(loss_type, int(count_targets(labels)), micro_batches))


@pytest.mark.parametrize("loss_type", ["default", "raw"])
@pytest.mark.parametrize("name", ["padded", "packed", "one_target"])
def test_every_micro_batch_weighs_the_same(name, loss_type):
    assert share(name, loss_type, micro_batches=4).sum() == 0.25


def test_a_micro_batch_weighs_as_much_as_its_share_of_the_targets():
    documents, labels = tensors("packed")
    step = Objective("per_token_loss", targets=16, micro_batches=3)
    assert shares(unpredictable_ignored(labels, documents), documents, step).sum() == 4 / 16


def test_samples_of_unlike_length_weigh_the_same():
    row = share("padded", "per_sample_loss").sum(-1)
    assert row.tolist() == [0.5, 0.5]


def test_packed_documents_weigh_the_same_whether_or_not_they_have_targets():
    # Documents of 2, 0 (its only other label is -100), 0 (a single token) and 2 targets.
    assert share("packed", "per_sample_loss")[0].tolist() == [1 / 8, 1 / 8, 0, 0, 0, 0, 1 / 8, 1 / 8, 0, 0]


def test_one_token_of_a_short_document_outweighs_one_of_a_long_one():
    documents, labels = torch.tensor([[0, 0, 1, 1, 1, 1, 1]]), torch.tensor([[-100, 1, -100, 2, 3, 4, 5]])
    by_document = shares(labels, documents, Objective("per_sample_loss", 5, 1))[0]
    by_token = shares(labels, documents, Objective("default", 5, 1))[0]
    assert by_document.tolist() == [0.5, 0, 1 / 8, 1 / 8, 1 / 8, 1 / 8, 0]
    assert by_token.tolist() == [1 / 5, 0, 1 / 5, 1 / 5, 1 / 5, 1 / 5, 0]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("name", ["no_targets", "nothing_real"])
def test_nothing_to_learn_is_zero_with_zero_gradients(name, loss_type):
    said = machine([name], loss_type, torch.float32)
    assert said["loss"] == 0
    assert said[name].eq(0).all()


def test_the_sum_is_never_narrower_than_fp32():
    _, labels = tensors("padded")
    for dtype, wide in [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]:
        assert cross_entropy(logits("padded").to(dtype), labels, torch.ones(labels.shape)).dtype == wide


def test_count_targets():
    documents, labels = tensors("packed")
    assert count_targets(unpredictable_ignored(labels, documents)).item() == 4
    assert count_targets(torch.full((2, 4), -100)).item() == 0
    assert count_targets(torch.tensor([[7, -100, -100]])).item() == 0  # the first label is nobody's target


def test_an_unknown_loss_type():
    with pytest.raises(ValueError, match="loss_type = 'mean' is unknown"):
        shares(torch.zeros(1, 3).long(), torch.zeros(1, 3).long(), Objective("mean", 1, 1))


def test_documents_of_a_mask_and_of_borders():
    assert document_ids(torch.tensor([[0, 1, 1, 0]])).tolist() == [[-1, 0, 0, -1]]
    packed = document_ids(torch.ones(1, 6), torch.tensor([0, 2, 3, 5], dtype=torch.int32))
    assert packed.tolist() == [[0, 0, 1, 2, 2, -1]]

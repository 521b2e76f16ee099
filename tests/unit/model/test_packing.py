"""Documents packed in one row: the same as each alone, and nothing of one in another."""

import dataclasses

import pytest
import torch
from model_cases import PIXELS, SAMPLES, choices, cu_seqlens, gradients, make_batch, run

from glmv.data import Sample, pack
from glmv.ops.kernels import Kernels
from glmv.ops.loss import Objective, count_targets, cross_entropy, shares
from spec.model import Batch, forward
from spec.train import Objective as LawObjective
from spec.train import contribution

PACKED = [case for case in SAMPLES if case.startswith("packed")]
TYPES = [[0, 1, 1, 0, 0], [0, 0], [2, 0, 2, 0], [0, 1, 0, 0, 0, 0]]
IMAGES = {0: [[1, 2, 4]], 3: [[1, 2, 2]]}
VIDEOS = {2: [[2, 2, 2]]}


def media(grids, number):
    if number not in grids:
        return None, None
    grid = torch.tensor(grids[number])
    generator = torch.Generator().manual_seed(number)
    return torch.randn(int(grid.prod(-1).sum()), PIXELS, generator=generator, dtype=torch.float64), grid


@pytest.fixture
def samples():
    made = []
    for number, types in enumerate(TYPES):
        types = torch.tensor(types)
        ids = torch.randint(1, 600, types.shape, generator=torch.Generator().manual_seed(number))
        labels = ids.masked_fill(types != 0, -100)
        made.append(Sample(str(number), ids, labels, types, *media(IMAGES, number), *media(VIDEOS, number)))
    return made


def law_batch(sample):
    """The law's batch of one document alone."""
    rows = (sample.input_ids, torch.ones_like(sample.input_ids), sample.mm_token_type_ids)
    pictures = (sample.pixel_values, sample.image_grid_thw, sample.labels[None])
    videos = (sample.pixel_values_videos, sample.video_grid_thw)
    return Batch(*(row[None] for row in rows), *pictures, *videos)


def law_of_each_alone(tiny, samples, chosen, loss_type):
    """Logits, loss and gradients of a step in which every document is a micro-batch of its own."""
    batches, lengths = [law_batch(sample) for sample in samples], [len(sample.input_ids) for sample in samples]
    step = LawObjective.of(batches, loss_type)
    parts = {layer: index_TK[: sum(lengths)].split(lengths) for layer, index_TK in chosen.items()}
    pinned = [{layer: part[number] for layer, part in parts.items()} for number in range(len(samples))]

    def law(policy):
        masters = {name: policy.widen(w) for name, w in tiny.weights.items()}
        logits, found = [], []
        for batch, pins in zip(batches, pinned):
            logits.append(forward(masters, tiny.law_config, batch, policy, pins).logits[0])
            found.append(contribution(tiny.weights, batch, step, tiny.law_config, policy, pins))
        gradients = {name: sum(part.gradients[name] for part in found) for name in found[0].gradients}
        return {"logits": torch.cat(logits), "loss": sum(part.loss for part in found), **gradients}

    return law


def test_a_packed_row_is_all_of_its_documents_alone(tiny, samples, judge):
    model, batch = tiny.model(torch.float64), pack(samples, 0, length=21)
    targets = int(count_targets(batch.labels))
    share = shares(batch.labels, batch.document_ids, Objective("per_sample_loss", targets, 1))
    with choices(model) as chosen:
        logits = model(**batch.model_inputs())
    loss = cross_entropy(logits, batch.labels, share)
    loss.backward()
    said = {"logits": logits[0, : batch.cu_seqlens[-1]], "loss": loss, **gradients(model)}
    judge(said, law_of_each_alone(tiny, samples, chosen, "per_sample_loss"), torch.float64)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("case", PACKED)
def test_no_document_sees_another(case, implementation, tiny):
    """Gradient of one document's logits with respect to all embeddings."""
    model, batch = tiny.model(torch.float64, kernels=Kernels(attention=implementation)), make_batch(case)
    embedded = []
    model.model.language_model.embed_tokens.register_forward_hook(lambda *args: embedded.append(args[-1]))
    logits = run(model, batch)
    for document in range(int(batch.document_ids.max()) + 1):
        own = batch.document_ids == document
        (grad_BSH,) = torch.autograd.grad(logits[own].square().sum(), embedded, retain_graph=True)
        assert grad_BSH.ne(0).any(-1).equal(own & (batch.mm_token_type_ids == 0))


def test_one_packed_document_is_a_plain_row(tiny):
    model, batch = tiny.model(torch.float32), make_batch("one_image")
    packed = dataclasses.replace(batch, document_ids=torch.zeros_like(batch.input_ids))
    assert cu_seqlens(packed).tolist() == [0, 13]
    assert run(model, packed).equal(run(model, batch))


def test_no_mask_of_the_whole_row_is_made(tiny, samples, monkeypatch):
    monkeypatch.setattr("glmv.model.text.causal_mask", None)
    tiny.model(torch.float32)(**pack(samples, 0, length=21).model_inputs())


def test_positions_start_anew_in_the_model(tiny, samples):
    model, seen = tiny.model(torch.float32), []
    model.model.language_model.register_forward_pre_hook(lambda _, args: seen.append(args[3]))
    packed = pack(samples, 0, length=21)
    for batch in (packed, *(pack([sample], 0) for sample in samples)):
        model(**batch.model_inputs())
    together, *alone = seen
    assert together[..., : packed.cu_seqlens[-1]].equal(torch.cat(alone, dim=-1))
    assert not together[..., packed.cu_seqlens[-1] :].any()

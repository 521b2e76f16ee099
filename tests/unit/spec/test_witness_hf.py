"""HF transformers says the same as the law: logits, loss, every gradient, every expert choice."""

import dataclasses

import pytest
import torch
from hf_witness import BATCHES, Video, build_witness, make_batch, pack

from spec.model import forward
from spec.numerics import Policy
from spec.train import Objective, contribution


def law_of(witness, batch, pinned):
    real = batch.attention_mask.bool()

    def law(policy):
        logits = forward(witness.weights, witness.config, batch, policy, pinned).logits[real]
        part = contribution(witness.weights, batch, Objective.of([batch]), witness.config, policy, pinned)
        return {"logits": logits, "loss": part.loss, **part.gradients}

    return law


def agree(witness, batch, judge):
    logits, loss, gradients, chosen = witness.testify(batch)
    said = {"logits": logits[batch.attention_mask.bool()], "loss": loss, **gradients}
    judge(said, law_of(witness, batch, chosen), torch.float32)


@pytest.mark.parametrize("case", BATCHES)
def test_logits_loss_and_every_gradient(case, witness, judge):
    agree(witness, BATCHES[case](), judge)


@pytest.mark.parametrize("case", BATCHES)
def test_expert_choice(case, witness):
    batch = BATCHES[case]()
    _, _, _, chosen = witness.testify(batch)
    real = batch.attention_mask.flatten().bool()
    routing = forward(witness.weights, witness.config, batch, Policy()).routing
    assert chosen.keys() == routing.keys()
    for layer, index_TK in chosen.items():
        assert index_TK[real].sort(-1).values.equal(routing[layer].top_k_index_TK[real].sort(-1).values)


def test_few_tokens_leave_experts_without_any(witness):
    _, _, gradients, _ = witness.testify(BATCHES["few_tokens"]())
    assert any(".experts." in name and not g.any() for name, g in gradients.items())


def test_group_limited_routing_without_normalisation(judge):
    witness = build_witness(text={"n_group": 4, "topk_group": 2, "norm_topk_prob": False})
    agree(witness, BATCHES["one_image"](), judge)


DOCUMENTS = {
    "texts": [[5], [11], [7]],
    "pictures": [[3, (4, 6), 5], [2, (2, 4), 9, (6, 2), 2]],
    "video_and_text": [[2, Video(2, 2, 4), 6], [8]],
    "image_and_video": [[2, (4, 2), 6], [3, Video(2, 2, 2), 4]],
}


@pytest.mark.parametrize("case", DOCUMENTS)
def test_packed_documents_are_what_hf_says_of_each_alone(case, witness, judge):
    alone = [make_batch([segments], seed=seed) for seed, segments in enumerate(DOCUMENTS[case])]
    logits, loss, gradients, chosen = witness.testify_together(alone)
    judge({"logits": logits, "loss": loss, **gradients}, law_of(witness, pack(alone), chosen), torch.float32)


def test_an_image_beside_a_video_is_what_hf_says_of_each_in_its_own_row(witness, judge):
    alone = [make_batch([[2, (4, 2), 7]]), make_batch([[3, Video(1, 2, 2), 4]])]
    together = make_batch([[2, (4, 2), 7], [3, Video(1, 2, 2), 4]])
    for name in ("input_ids", "labels"):
        getattr(together, name).copy_(torch.cat([getattr(b, name) for b in alone]))
    together = dataclasses.replace(
        together, pixel_values=alone[0].pixel_values, pixel_values_videos=alone[1].pixel_values_videos
    )
    logits, loss, gradients, chosen = witness.testify_together(alone)
    judge({"logits": logits, "loss": loss, **gradients}, law_of(witness, together, chosen), torch.float32)


def test_a_wrong_count_of_image_tokens_is_refused(witness):
    batch = BATCHES["one_image"]()
    batch.mm_token_type_ids[0, 5] = 0
    with pytest.raises(ValueError, match="6 features for 5 tokens of type 1"):
        forward(witness.weights, witness.config, batch, Policy())

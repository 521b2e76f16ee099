"""HF transformers says the same as the law: logits, loss, every gradient, every expert choice."""

import pytest
import torch
from hf_witness import BATCHES, build_witness

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


@pytest.mark.parametrize("case", BATCHES)
def test_logits_loss_and_every_gradient(case, witness, judge):
    batch = BATCHES[case]()
    logits, loss, gradients, chosen = witness.testify(batch)
    said = {"logits": logits[batch.attention_mask.bool()], "loss": loss, **gradients}
    judge(said, law_of(witness, batch, chosen), torch.float32)


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
    batch = BATCHES["few_tokens"]()
    _, _, gradients, _ = witness.testify(batch)
    assert any(".experts." in name and not g.any() for name, g in gradients.items())


def test_group_limited_routing_without_normalisation(judge):
    witness = build_witness(n_group=4, topk_group=2, norm_topk_prob=False)
    batch = BATCHES["one_image"]()
    logits, loss, gradients, chosen = witness.testify(batch)
    said = {"logits": logits[batch.attention_mask.bool()], "loss": loss, **gradients}
    judge(said, law_of(witness, batch, chosen), torch.float32)


def test_a_wrong_count_of_image_tokens_is_refused(witness):
    batch = BATCHES["one_image"]()
    batch.mm_token_type_ids[0, 5] = 0
    with pytest.raises(ValueError, match="6 features for 5 tokens of type 1"):
        forward(witness.weights, witness.config, batch, Policy())

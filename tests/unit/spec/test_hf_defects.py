"""Where HF 5.24.0 is wrong the law follows the architecture. These tests notice when HF is mended."""

import pytest
import torch
from hf_witness import Video, inputs, make_batch, pack
from transformers.modeling_flash_attention_utils import _is_packed_sequence

from spec.model import forward
from spec.numerics import Policy
from spec.rope import mrope_positions
from spec.train import Objective, contribution


def test_hf_refuses_an_image_and_a_video_in_one_batch(witness):
    batch = make_batch([[2, (4, 2), 3, Video(1, 2, 2), 4]])
    with pytest.raises(ValueError, match="do not match"):
        witness.model(**inputs(batch), use_cache=False)
    assert forward(witness.weights, witness.config, batch, Policy()).logits.isfinite().all()


def packed_difference(witness, **options):
    """Largest logit difference between HF's packed row and the same documents alone."""
    alone = [make_batch([[9]], seed=0), make_batch([[13]], seed=1)]
    batch = pack(alone)
    own = torch.cat([torch.arange(9), torch.arange(13)])[None, None]
    position_ids = torch.cat([own, mrope_positions(batch.documents, batch.mm_token_type_ids, {}, 2)])
    with torch.no_grad():
        packed = witness.model(input_ids=batch.input_ids, position_ids=position_ids, **options).logits[0]
        apart = torch.cat([witness.model(**inputs(b), use_cache=False).logits[0] for b in alone])
    return float((packed - apart).abs().max() / apart.abs().max())


def test_hf_packs_without_a_cache_only(witness):
    rounding = torch.finfo(torch.float32).eps
    assert packed_difference(witness, use_cache=False) < 100 * rounding
    assert packed_difference(witness) > 1e5 * rounding


def test_hf_takes_three_rows_of_positions_for_packing(witness):
    batch = make_batch([[19]])
    position_3BS = mrope_positions(batch.documents, batch.mm_token_type_ids, {}, 2)
    assert bool(_is_packed_sequence(position_3BS, batch_size=1))


def test_hf_has_no_loss_for_masked_labels(witness):
    batch = make_batch([[9]])
    batch.labels.fill_(-100)
    assert witness.model(**inputs(batch), use_cache=False).loss.isnan()
    law = contribution(witness.weights, batch, Objective.of([batch]), witness.config, Policy())
    assert law.loss == 0
    assert not any(g.any() for g in law.gradients.values())

import logging

import pytest
import torch
from attention_cases import (
    GRAD,
    KEY,
    MASKS,
    QUERY,
    VALUE,
    documents_law,
    masked_law,
    segments_law,
    with_gradients,
)
from op_cases import DTYPES, leaf

from glmv.ops import registry
from glmv.ops.attention import Visible, attention, causal_mask, segment_attention, text_attention


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MASKS)
def test_causal_attention(name, implementation, dtype, device, judge):
    mask = None if MASKS[name] is None else torch.tensor(MASKS[name]).bool()
    leaves = [leaf(states, dtype, device) for states in (QUERY, KEY, VALUE)]
    seen = None if mask is None else causal_mask(mask.to(device))
    output = attention(*leaves, seen, implementation=implementation, causal=True)
    judge(with_gradients(output, leaves, GRAD.to(dtype).to(device)), masked_law(mask), dtype)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("lengths", [[7], [3, 4], [2, 2, 3], [1, 3, 3], [2, 1, 2, 2]], ids=str)
def test_attention_inside_segments(lengths, implementation, device, judge):
    leaves = [leaf(states, torch.float64, device) for states in (QUERY[0], QUERY[1], GRAD[1])]
    output = segment_attention(*leaves, lengths, implementation=implementation)
    judge(with_gradients(output, leaves, GRAD[0].to(device)), segments_law(lengths), torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("lengths", [[7], [3, 4], [2, 2, 3], [1, 1, 1], [2, 3]], ids=str)
def test_causal_attention_inside_packed_documents(lengths, implementation, dtype, device, judge):
    leaves = [leaf(states[:1], dtype, device) for states in (QUERY, KEY, VALUE)]
    output = text_attention(*leaves, Visible(documents=lengths), implementation=implementation)
    judge(with_gradients(output, leaves, GRAD[:1].to(dtype).to(device)), documents_law(lengths), dtype)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_what_stands_at_padded_keys_does_not_matter(implementation):
    mask = torch.tensor(MASKS["left"]).bool()
    options = {"implementation": implementation, "causal": True}
    clean = attention(QUERY, KEY, VALUE, causal_mask(mask), **options)
    padded = ~mask[:, None, :, None]
    dirty = attention(QUERY, KEY.masked_fill(padded, 1e3), VALUE.masked_fill(padded, 1e3), causal_mask(mask), **options)
    assert clean.equal(dirty)


def test_flash_is_sdpa_where_pytorch_chooses_the_kernel(caplog):
    registry.say_once.cache_clear()
    options = {"causal": True}
    with caplog.at_level(logging.INFO):
        flash = [attention(QUERY, KEY, VALUE, None, implementation="flash", **options) for _ in range(2)]
    assert flash[1].equal(attention(QUERY, KEY, VALUE, None, implementation="sdpa", **options))
    assert [record.message for record in caplog.records] == ["attn_implementation: PyTorch's SDPA runs on cpu"]

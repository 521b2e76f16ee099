"""Attention on an NPU, with the device's fused kernel and with PyTorch's operators, against the law."""

import pytest
import torch
from attention_cases import GRAD, HEADS, KEY, MASKS, QUERY, SHARED, VALUE, documents_law, masked_law, segments_law
from attention_cases import with_gradients as answers
from op_cases import draw, leaf

from glmv.ops.attention import Visible, attention, causal_mask, segment_attention, text_attention
from glmv.ops.npu.attention import COMPRESSED, MAX_SEGMENTS

BF16, FP32 = torch.bfloat16, torch.float32
FUSED = "npu_fusion_attention"


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_causal_attention(name, dtype, device, judge):
    mask = None if MASKS[name] is None else torch.tensor(MASKS[name]).bool()
    leaves = [leaf(states, dtype, device) for states in (QUERY, KEY, VALUE)]
    seen = None if mask is None else causal_mask(mask.to(device))
    output = attention(*leaves, seen, implementation="flash", causal=True)
    judge(answers(output, leaves, GRAD.to(device, dtype)), masked_law(mask), dtype)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["none", "left"])
def test_pytorchs_own_attention(name, implementation, device, judge, count):
    mask = None if MASKS[name] is None else torch.tensor(MASKS[name]).bool()
    leaves = [leaf(states, FP32, device) for states in (QUERY, KEY, VALUE)]
    seen = None if mask is None else causal_mask(mask.to(device))
    with count() as counted:
        output = attention(*leaves, seen, implementation=implementation, causal=True)
    judge(answers(output, leaves, GRAD.to(device, FP32)), masked_law(mask), FP32)
    assert FUSED not in counted.calls


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("lengths", [[7], [3, 4], [2, 1, 2, 2]], ids=str)
def test_attention_inside_segments(lengths, dtype, device, judge):
    leaves = [leaf(states, dtype, device) for states in (QUERY[0], QUERY[1], GRAD[1])]
    output = segment_attention(*leaves, lengths, implementation="flash")
    judge(answers(output, leaves, GRAD[0].to(device, dtype)), segments_law(lengths), dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("lengths", [[7], [2, 2, 3], [1, 3, 1], [2, 3]], ids=str)
def test_causal_attention_inside_packed_documents(lengths, dtype, device, judge):
    leaves = [leaf(states[:1], dtype, device) for states in (QUERY, KEY, VALUE)]
    output = text_attention(*leaves, Visible(documents=lengths), implementation="flash")
    judge(answers(output, leaves, GRAD[:1].to(device, dtype)), documents_law(lengths), dtype)


def test_a_query_that_sees_nothing_gives_exactly_zero(device):
    seen = causal_mask(torch.tensor(MASKS["nothing"], device=device).bool())
    leaves = [leaf(states, BF16, device) for states in (QUERY, KEY, VALUE)]
    output = attention(*leaves, seen, implementation="flash", causal=True)
    output[1].sum().backward()
    assert output[1].eq(0).all()
    assert all(x.grad.eq(0).all() for x in leaves)


def test_causal_beyond_the_compressed_mask(device):
    """The mask is 2048 wide whatever the sequence: the last of more tokens still sees the first, and no later one."""
    length = COMPRESSED + 5
    query, key = torch.zeros(1, 1, length, 8, device=device), torch.zeros(1, 1, length, 8, device=device)
    value = torch.arange(length, dtype=FP32, device=device)[None, None, :, None].expand(-1, -1, -1, 8)
    output = attention(query, key, value, None, implementation="flash", causal=True)
    mean = torch.arange(length, dtype=torch.float64) / 2  # of 0 .. i
    assert output[0, 0, :, 0].double().cpu().sub(mean).abs().max() < 0.25  # one token more or less moves it by 0.5


@pytest.mark.parametrize("lengths", [[5, 1, 3], [4] * 20], ids=["unlike", "many"])
def test_all_segments_are_one_call(lengths, device, count):
    states = [draw(2, sum(lengths), 8, seed=seed).to(device, BF16) for seed in range(3)]
    with count() as counted:
        segment_attention(*states, lengths, implementation="flash")
    assert counted.calls[FUSED] == 1
    assert counted.sync_causes == {}


def test_more_segments_than_the_kernel_takes(device, said):
    states = [draw(1, MAX_SEGMENTS + 1, 4, seed=seed).to(device, FP32) for seed in range(3)]
    output = segment_attention(*states, [1] * (MAX_SEGMENTS + 1), implementation="flash")
    assert output.cpu().equal(states[2].cpu())  # a token that sees itself alone
    assert any("1025 segments are more than 1024" in message for message in said())


def test_shared_heads_are_not_repeated(device, count):
    with count(record=True) as counted:
        attention(*(x.to(device, BF16) for x in (QUERY, KEY, VALUE)), None, implementation="flash", causal=True)
    (call,) = (call for call in counted.recorded if call.name == FUSED)
    given = {**call.kwargs, **dict(zip(("query", "key", "value", "head_num"), call.args))}
    assert (given["query"].shape[1], given["key"].shape[1], given["head_num"]) == (HEADS, SHARED, HEADS)


def test_states_of_two_dtypes_are_attended_to_in_the_narrower(device):
    """Under autocast rotated queries and keys come in fp32, values in bf16."""
    query, key, value = (x.to(device, dtype) for x, dtype in zip((QUERY, KEY, VALUE), (FP32, FP32, BF16)))
    mixed = attention(query, key, value, None, implementation="flash", causal=True)
    narrow = attention(query.to(BF16), key.to(BF16), value, None, implementation="flash", causal=True)
    assert mixed.equal(narrow)


def test_training_after_a_first_call_in_inference_mode(device):
    from glmv.ops.npu.attention import _future

    _future.cache_clear()
    states = [x.to(device, BF16) for x in (QUERY, KEY, VALUE)]
    with torch.inference_mode():
        attention(*states, None, implementation="flash", causal=True)
    leaves = [leaf(x, BF16, device) for x in (QUERY, KEY, VALUE)]
    attention(*leaves, None, implementation="flash", causal=True).sum().backward()
    assert all(x.grad.any() for x in leaves)

"""Blocks of attention with their statistics, put together again."""

import pytest
import torch
from attention_cases import HEADS, LENGTH, SHARED, documents_law, masked_law
from op_cases import DTYPES, draw

from glmv.ops.attention_block import attend_block, attend_block_backward, merge

QUERY, GRAD = draw(1, HEADS, LENGTH, 16), draw(1, HEADS, LENGTH, 16, seed=3)
KEY, VALUE = draw(1, SHARED, LENGTH, 16, seed=1), draw(1, SHARED, LENGTH, 16, seed=2)
KERNELS = pytest.mark.parametrize("kernel", ["eager", "flash"])
NOTHING = float("-inf")


def first_row(law):
    """The law's answers about the first row of a batch."""
    return lambda policy: {name: states[:1] for name, states in law(policy).items()}


def in_two_blocks(cut, dtype, device, kernel):
    """Causal attention whose queries from `cut` on see the keys before it in one block, and their own in another."""
    query, key, value, grad = (states.to(dtype).to(device) for states in (QUERY, KEY, VALUE, GRAD))
    blocks = [(slice(0, cut), slice(0, cut), True), (slice(cut, None), slice(0, cut), False)]
    blocks += [(slice(cut, None), slice(cut, None), True)]
    wide = torch.promote_types(dtype, torch.float32)
    output = torch.zeros_like(query, dtype=wide)
    lse = output.new_full(output.shape[:3], NOTHING)
    for rows, keys, causal in blocks:
        more, more_lse = attend_block(
            query[:, :, rows], key[:, :, keys], value[:, :, keys], causal=causal, implementation=kernel
        )
        output[:, :, rows], lse[:, :, rows] = merge(output[:, :, rows], lse[:, :, rows], more.to(wide), more_lse)
    grads = [torch.zeros_like(states, dtype=wide) for states in (query, key, value)]
    for rows, keys, causal in blocks:
        states = grad[:, :, rows], query[:, :, rows], key[:, :, keys], value[:, :, keys]
        whole = output[:, :, rows].to(dtype), lse[:, :, rows]
        found = attend_block_backward(*states, *whole, causal=causal, implementation=kernel)
        for sum_, part, more in zip(grads, (rows, keys, keys), found, strict=True):
            sum_[:, :, part] += more
    names = "output", "query", "key", "value"
    return {name: states.to(dtype) for name, states in zip(names, (output, *grads), strict=True)}


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", [1, 3, 6])
def test_blocks_put_together_are_the_whole(cut, dtype, kernel, device, judge):
    judge(in_two_blocks(cut, dtype, device, kernel), documents_law([LENGTH]), dtype)


def test_the_two_laws_agree_on_one_row():
    """The law of documents is that of rows."""
    one, other = documents_law([LENGTH]), first_row(masked_law(None))
    from spec.numerics import Policy

    assert one(Policy())["output"].equal(other(Policy())["output"])


@KERNELS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_statistics_of_16_bit_states_are_fp32(dtype, kernel, device):
    query, key, value = (states.to(dtype).to(device) for states in (QUERY, KEY, VALUE))
    assert attend_block(query, key, value, causal=True, implementation=kernel)[1].dtype == torch.float32


@KERNELS
def test_a_causal_block_must_be_square(kernel):
    """Kernels differ on which corner they count from."""
    with pytest.raises(AssertionError, match=r"must be square, not \[7, 4\]"):
        attend_block(QUERY, KEY[:, :, :4], VALUE[:, :, :4], causal=True, implementation=kernel)


def test_a_block_that_a_query_did_not_see_adds_nothing():
    output, lse = torch.randn(2, 3), torch.tensor([0.5, NOTHING])
    garbage, unseen = torch.full((2, 3), float("nan")), torch.full((2,), NOTHING)
    merged, merged_lse = merge(output, lse, garbage, unseen)
    assert merged[0].equal(output[0])
    assert merged[1].equal(torch.zeros(3))
    assert merged_lse.equal(lse)


@pytest.mark.parametrize("shift", [-2000.0, 2000.0])
def test_large_scores_neither_overflow_nor_vanish(shift):
    """Both blocks count half; exp(2000) is infinite, exp(-2000) is zero."""
    lse = torch.full((1,), shift)
    merged, merged_lse = merge(torch.tensor([[1.0]]), lse, torch.tensor([[3.0]]), lse)
    assert merged.item() == 2.0
    assert merged_lse.equal(lse + torch.tensor(2.0).log())

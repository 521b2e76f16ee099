import pytest
import torch
from op_cases import DTYPES, draw, leaf

from glmv.ops.attention import Visible, attention, causal_mask, segment_attention, text_attention
from spec.numerics import attend

HEADS, SHARED, LENGTH, DIM = 6, 2, 7, 16
MASKS = {
    "none": None,
    "right": [[1] * 7, [1] * 4 + [0] * 3],
    "left": [[1] * 7, [0] * 3 + [1] * 4],
    "hole": [[1, 1, 0, 1, 1, 0, 1], [0, 1, 0, 0, 1, 1, 1]],
    "nothing": [[1] * 7, [0] * 7],
}


QUERY = draw(2, HEADS, LENGTH, DIM)
KEY, VALUE = draw(2, SHARED, LENGTH, DIM, seed=1), draw(2, SHARED, LENGTH, DIM, seed=2)
GRAD = draw(2, HEADS, LENGTH, DIM, seed=3)


def with_gradients(output, leaves, grad):
    output.backward(grad)
    grads = {name: leaf.grad for name, leaf in zip(("query", "key", "value"), leaves)}
    return {"output": output.detach(), **grads}


def law(mask):
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None]
    if mask is not None:
        allowed = allowed & mask[:, None, :]

    def law(policy):
        leaves = [leaf(states, policy.wide) for states in (QUERY, KEY, VALUE)]
        query, key, value = (policy.enter(leaf) for leaf in leaves)
        key, value = (states.repeat_interleave(HEADS // SHARED, dim=1) for states in (key, value))
        output = attend(query, key, value, allowed[:, None], DIM**-0.5, policy)
        return with_gradients(output, leaves, policy.round(GRAD))

    return law


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MASKS)
def test_causal_attention(name, implementation, dtype, device, judge):
    mask = None if MASKS[name] is None else torch.tensor(MASKS[name]).bool()
    leaves = [leaf(states, dtype, device) for states in (QUERY, KEY, VALUE)]
    seen = None if mask is None else causal_mask(mask.to(device))
    output = attention(*leaves, seen, implementation=implementation, causal=True)
    judge(with_gradients(output, leaves, GRAD.to(dtype).to(device)), law(mask), dtype)


def segments_law(lengths):
    segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    allowed = segment[:, None] == segment[None, :]

    def law(policy):
        leaves = [leaf(states, policy.wide) for states in (QUERY[0], QUERY[1], GRAD[1])]
        output = attend(*(policy.enter(leaf) for leaf in leaves), allowed, DIM**-0.5, policy)
        return with_gradients(output, leaves, policy.round(GRAD[0]))

    return law


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("lengths", [[7], [3, 4], [2, 2, 3], [1, 3, 3], [2, 1, 2, 2]], ids=str)
def test_attention_inside_segments(lengths, implementation, device, judge):
    leaves = [leaf(states, torch.float64, device) for states in (QUERY[0], QUERY[1], GRAD[1])]
    output = segment_attention(*leaves, lengths, implementation=implementation)
    judge(with_gradients(output, leaves, GRAD[0].to(device)), segments_law(lengths), torch.float64)


def documents_law(lengths):
    document = torch.tensor([n for n, length in enumerate(lengths) for _ in range(length)])
    document = torch.nn.functional.pad(document, (0, LENGTH - len(document)), value=-1)
    allowed = (document[:, None] == document[None, :]) & (document >= 0)[None, :]
    allowed &= torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()

    def law(policy):
        leaves = [leaf(states[:1], policy.wide) for states in (QUERY, KEY, VALUE)]
        query, key, value = (policy.enter(leaf) for leaf in leaves)
        key, value = (states.repeat_interleave(HEADS // SHARED, dim=1) for states in (key, value))
        output = attend(query, key, value, allowed, DIM**-0.5, policy)
        return with_gradients(output, leaves, policy.round(GRAD[:1]))

    return law


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

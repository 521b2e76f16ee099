"""Attention of text and vision: masks, segments and documents, and what the law says about them."""

import torch
from op_cases import draw, leaf

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
    """Output and gradients by name."""
    output.backward(grad)
    grads = {name: leaf.grad for name, leaf in zip(("query", "key", "value"), leaves)}
    return {"output": output.detach(), **grads}


def masked_law(mask):
    """Causal attention of padded rows."""
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


def segments_law(lengths):
    """Full attention inside each segment."""
    segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    allowed = segment[:, None] == segment[None, :]

    def law(policy):
        leaves = [leaf(states, policy.wide) for states in (QUERY[0], QUERY[1], GRAD[1])]
        output = attend(*(policy.enter(leaf) for leaf in leaves), allowed, DIM**-0.5, policy)
        return with_gradients(output, leaves, policy.round(GRAD[0]))

    return law


def documents_law(lengths):
    """Causal attention inside each document; what stands behind them is padding."""
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

"""What must change nothing: padding, the order of packed documents, the numbers that experts go by.

The machine runs the changed input and is judged by what the law says of the original.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import Tiny, answers

from spec.model import Batch

FLOAT64 = torch.float64
EXPERTS = 12
drawn = settings(max_examples=5)
# With two tokens attention would look at one: the gradients of queries and keys would be exactly zero.
documents = st.lists(st.integers(3, 9), min_size=2, max_size=4)


def row(lengths, seed=0):
    """Text documents of these lengths, packed into one row."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 600, (1, sum(lengths)), generator=random)
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    return Batch(ids, torch.ones_like(ids), torch.zeros_like(ids), labels=ids.clone(), document_ids=document)


def without_logits(tensors):
    return {name: t for name, t in tensors.items() if name != "logits"}


def law_of(tiny, batch):
    ask = tiny.law(batch, {})
    return lambda policy: without_logits(ask(policy))


@drawn
@given(length=st.integers(3, 12), left=st.integers(0, 4), right=st.integers(0, 4))
def test_padding_changes_nothing(tiny, judge, length, left, right):
    single = replace(row([length]), document_ids=None)
    padded = {name: F.pad(t, (left, right)) for name, t in vars(single).items() if t is not None and name != "labels"}
    padded["labels"] = F.pad(single.labels, (left, right), value=-100)
    said, _ = answers(tiny.model(FLOAT64), Batch(**padded))
    judge(said, tiny.law(single, {}), FLOAT64)


@drawn
@given(lengths=documents, data=st.data())
def test_the_order_of_documents_changes_no_gradient(tiny, judge, lengths, data):
    batch, order = row(lengths), data.draw(st.permutations(range(len(lengths))))
    parts = batch.input_ids[0].split(lengths)
    ids = torch.cat([parts[number] for number in order])[None]
    other = replace(row([lengths[number] for number in order]), input_ids=ids, labels=ids.clone())
    said, _ = answers(tiny.model(FLOAT64), other)
    judge(without_logits(said), law_of(tiny, batch), FLOAT64)


@drawn
@given(order=st.permutations(range(EXPERTS)))
def test_experts_may_go_by_any_number(tiny, judge, order):
    batch, renamed = row([9, 4]), object.__new__(Tiny)
    renamed.config, renamed.law_config, renamed.weights = tiny.config, tiny.law_config, relabelled(tiny.weights, order)
    said, _ = answers(renamed.model(FLOAT64), batch)
    back = [order.index(expert) for expert in range(EXPERTS)]
    judge(relabelled(said, back), tiny.law(batch, {}), FLOAT64)


def relabelled(tensors, order):
    """Expert n of the result is expert order[n] of the argument, in routers as in experts."""
    result = {}
    for name, tensor in tensors.items():
        before, _, after = name.partition(".mlp.experts.")
        if after:
            number, rest = after.split(".", 1)
            result[f"{before}.mlp.experts.{order.index(int(number))}.{rest}"] = tensor
        else:
            result[name] = tensor[list(order)] if ".mlp.gate." in name else tensor
    return result


def test_relabelling_there_and_back_is_nothing(tiny):
    order = [5, 0, 3, *range(6, EXPERTS), 1, 2, 4]
    back = [order.index(expert) for expert in range(EXPERTS)]
    again = relabelled(relabelled(tiny.weights, order), back)
    assert all(again[name].equal(tensor) for name, tensor in tiny.weights.items())
    assert not relabelled(tiny.weights, order)["model.language_model.layers.1.mlp.gate.weight"].equal(
        tiny.weights["model.language_model.layers.1.mlp.gate.weight"]
    )

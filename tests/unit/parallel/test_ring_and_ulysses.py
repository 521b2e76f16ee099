"""Attention over ranks as threads: any lengths, documents and degrees give what the law says of the whole."""

import threading

import pytest
import torch
from context_cases import HEADS, SHARED, documents, inputs_of, law_of_documents, run_part, whole_of
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_cases import ThreadContext, ThreadRing, boxes_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from glmv.ops.documents import document_ids
from glmv.parallel import ring
from glmv.parallel.sequence import Degrees
from glmv.parallel.ulysses import head_fault
from glmv.verify.testing.threads import run_ranks

degrees = st.builds(Degrees, st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4])).filter(lambda d: 1 < d.size < 9)
kernels = st.sampled_from(["eager", "sdpa", "flash"])
OF_RING_RANK_1 = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0]).double()


def has_tokens(document_BS):
    return bool((document_BS >= 0).any())


def attend(document_BS, degrees, kernel, given, dtype=torch.float64):
    """Output and gradients of all ranks, put together; and what each has sent."""
    boxes = boxes_of(degrees)

    def rank_of(rank):
        own = ThreadContext(degrees, rank, boxes)
        said = run_part(own, document_BS, given, dtype, kernel)
        return said, *(0 if part is None else part.traffic.bytes for part in (own.ring, own.ulysses))

    parts, ring_bytes, ulysses_bytes = zip(*run_ranks(degrees.size, rank_of))
    return whole_of(parts, document_BS, degrees), ring_bytes, ulysses_bytes


@settings(max_examples=60)
@given(documents().filter(has_tokens), degrees, kernels)
def test_any_sequence_over_any_ranks(judge, document_BS, degrees, kernel):
    given = inputs_of(document_BS)
    judge(attend(document_BS, degrees, kernel, given)[0], law_of_documents(document_BS, given), torch.float64)


@settings(max_examples=10)
@given(degrees, kernels, st.integers(0, 3), st.integers(0, 3))
def test_padding_of_the_batch_changes_no_bit(degrees, kernel, left, right):
    document_BS = document_ids(torch.ones(1, 9))
    given = inputs_of(document_BS)
    plain, *_ = attend(document_BS, degrees, kernel, given)
    padded_BS = torch.nn.functional.pad(document_BS, (left, right), value=-1)
    more = {name: torch.nn.functional.pad(t, (0, 0, left, right), value=7) for name, t in given.items()}
    padded, *_ = attend(padded_BS, degrees, kernel, more)
    assert all(padded[name][:, :, left : left + 9].equal(states) for name, states in plain.items())


def bf16_ring_of_equal_scores(kernel):
    """All scores are 100, where the steps of bf16 are 0.5. Values are 0 on ring rank 0 and 1 on ring rank 1.

    Only the last token's output has a gradient.
    """
    document_BS = document_ids(torch.ones(1, 8))
    given = {name: torch.full_like(states, 5) for name, states in inputs_of(document_BS).items()}
    given["value"] = OF_RING_RANK_1[:, None].expand_as(given["value"])
    given["grad"] = (torch.arange(8) == 7)[:, None].expand_as(given["grad"]).double()
    return attend(document_BS, Degrees(ring=2), kernel, given, torch.bfloat16)[0]


@pytest.mark.parametrize("kernel", ["eager", "flash"])
def test_blocks_of_a_bf16_ring_are_weighed_in_fp32(kernel):
    output = bf16_ring_of_equal_scores(kernel)["output"]
    means = OF_RING_RANK_1.cumsum(0) / torch.arange(1, 9)
    assert output.equal(means.bfloat16()[:, None].expand_as(output))


@pytest.mark.parametrize("kernel", ["eager", "flash"])
def test_probabilities_of_a_bf16_ring_are_rebuilt_in_fp32(kernel):
    """The last token gives each of eight values an eighth of its gradient, from each head that shares them."""
    grad = bf16_ring_of_equal_scores(kernel)["value"]
    assert grad.equal(torch.full_like(grad, HEADS / SHARED / 8))


@pytest.mark.parametrize("degrees", [Degrees(2, 1), Degrees(4, 1), Degrees(3, 2)], ids=str)
def test_a_ring_sends_what_its_docstring_says(degrees):
    document_BS = document_ids(torch.ones(1, 26), torch.tensor([0, 9, 24]))
    _, sent, _ = attend(document_BS, degrees, "flash", inputs_of(document_BS, shared=2))
    places = sum(2 * -(-length // (2 * degrees.ring)) for length in (9, 15))
    # The key-value heads of one Ulysses rank; 16 channels of 8 bytes, as are the gradients in float64.
    block = 2 * (2 // degrees.ulysses) * places * 16 * 8
    assert set(sent) == {(2 * (degrees.ring - 1) + degrees.ring) * block}


@pytest.mark.parametrize("ulysses", [2, 4])
def test_ulysses_sends_what_its_docstring_says(ulysses):
    document_BS = document_ids(torch.ones(2, 10))
    _, _, sent = attend(document_BS, Degrees(1, ulysses), "flash", inputs_of(document_BS, shared=2))
    places, repeated = -(-10 // ulysses), max(2, ulysses)
    assert set(sent) == {2 * (ulysses - 1) * (2 * HEADS + 2 * repeated) * 2 * places * 16 * 8 // ulysses}


def test_the_next_keys_are_under_way_while_a_block_is_computed(monkeypatch):
    """Else every exchange would stand still between two blocks."""
    order = threading.local()
    seen = []

    def noting(what, function):
        def noted(*args, **kwargs):
            seen.append((order.rank, what))
            return function(*args, **kwargs)

        return noted

    monkeypatch.setattr(ThreadRing, "pass_on", noting("send", ThreadRing.pass_on))
    monkeypatch.setattr(ring, "attend_block", noting("block", ring.attend_block))
    (boxes,) = boxes_of(Degrees(ring=3))
    states = inputs_of(document_ids(torch.ones(1, 6)))

    def rank_of(rank):
        order.rank = rank
        ThreadRing(rank, 3, boxes).attend(states["query"], states["key"], states["value"], [6], implementation="flash")

    run_ranks(3, rank_of)
    assert [what for rank, what in seen if rank == 1] == ["send", "block", "send", "block", "block"]


class Largest(TorchDispatchMode):
    """The most elements of any tensor made meanwhile."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        sizes = [part.numel() for part in (made if isinstance(made, tuple) else (made,)) if isinstance(part, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return made


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_makes_nothing_larger_than_its_queries_or_two_of_its_keys(ranks):
    """Far less than scores: 256 places of a rank see up to 1024 keys."""
    (boxes,) = boxes_of(Degrees(ring=ranks))
    states = inputs_of(document_ids(torch.ones(1, 256)))

    def rank_of(rank):
        leaves = [states[name].clone().requires_grad_() for name in ("query", "key", "value")]
        with Largest() as largest:
            output = ThreadRing(rank, ranks, boxes).attend(*leaves, [256], implementation="flash")
            output.backward(states["grad"])
        return largest.elements

    assert max(run_ranks(ranks, rank_of)) == max(states["query"].numel(), 2 * states["key"].numel())


@pytest.mark.parametrize(("heads", "ulysses"), [(96, 4), (96, 6), (4, 2)])
def test_ranks_that_divide_the_heads_are_taken(heads, ulysses):
    assert head_fault(heads, ulysses, "key") is None


def test_ranks_that_do_not_divide_the_heads_are_refused_with_the_numbers():
    said = head_fault(12, 5, "parallel.ulysses_parallel_size")
    assert said.startswith("parallel.ulysses_parallel_size = 5 does not divide the 12 query heads of the text decoder.")
    assert "Choose 1, 2, 3, 4, 6 or 12, and" in said
    assert "Choose 1, and" in head_fault(1, 2, "key")

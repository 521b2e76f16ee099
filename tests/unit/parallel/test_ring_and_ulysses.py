"""Attention over ranks as threads: any lengths, documents and degrees give what the law says of the whole."""

import threading
from queue import SimpleQueue

import pytest
import torch
import torch.distributed as dist
from context_cases import HEADS, documents, inputs_of, law_of_documents, run_part, whole_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from glmv.ops.documents import document_ids
from glmv.parallel import ring
from glmv.parallel.context_parallel import ContextParallel
from glmv.parallel.dispatch import Traffic
from glmv.parallel.ring import Ring
from glmv.parallel.sequence import Degrees
from glmv.parallel.ulysses import Ulysses, head_fault
from glmv.verify.testing.threads import run_ranks

degrees = st.builds(Degrees, st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4])).filter(lambda d: 1 < d.size < 9)
kernels = st.sampled_from(["eager", "sdpa", "flash"])


class Letterbox:
    """What comes to a rank from its neighbour; threads have no point-to-point transport."""

    def __init__(self, box, leaving):
        self.box, self.leaving = box, leaving

    def wait(self):
        return self.box.get(timeout=20)


class ThreadRing(Ring):
    """A ring whose ranks are threads."""

    def __init__(self, rank, size, boxes):
        self.rank, self.size, self.boxes, self.traffic = rank, size, boxes, Traffic()

    def pass_on(self, leaving, tag):
        self.boxes[(self.rank + 1) % self.size, tag].put(leaving.clone())
        self.traffic.bytes += leaving.numel() * leaving.element_size()
        return Letterbox(self.boxes[self.rank, tag], leaving)


class ThreadContext(ContextParallel):
    """Ranks that share a sequence, all of them in this process."""

    def __init__(self, degrees, rank, boxes):
        self.degrees, self.rank, self.partition = degrees, rank, None
        ring_rank, ulysses_rank = degrees.place(rank)
        groups = [dist.new_group([*range(n * degrees.ulysses, (n + 1) * degrees.ulysses)]) for n in range(degrees.ring)]
        self.ulysses = Ulysses(groups[ring_rank]) if degrees.ulysses > 1 else None
        self.ring = ThreadRing(ring_rank, degrees.ring, boxes[ulysses_rank]) if degrees.ring > 1 else None


def has_tokens(document_BS):
    return bool((document_BS >= 0).any())


def attend(document_BS, degrees, kernel, given):
    """Output and gradients of all ranks, put together; and what each has sent."""
    boxes = [{(r, tag): SimpleQueue() for r in range(degrees.ring) for tag in (0, 1)} for _ in range(degrees.ulysses)]

    def rank_of(rank):
        own = ThreadContext(degrees, rank, boxes)
        said = run_part(own, document_BS, given, torch.float64, kernel)
        return said, *(0 if part is None else part.traffic.bytes for part in (own.ring, own.ulysses))

    parts, ring_bytes, ulysses_bytes = zip(*run_ranks(degrees.size, rank_of))
    return whole_of(parts, document_BS, degrees), ring_bytes, ulysses_bytes


@settings(deadline=None, max_examples=60)
@given(documents().filter(has_tokens), degrees, kernels)
def test_any_sequence_over_any_ranks(judge, document_BS, degrees, kernel):
    given = inputs_of(document_BS)
    judge(attend(document_BS, degrees, kernel, given)[0], law_of_documents(document_BS, given), torch.float64)


@settings(deadline=None, max_examples=10)
@given(degrees, kernels, st.integers(0, 3), st.integers(0, 3))
def test_padding_of_the_batch_changes_no_bit(degrees, kernel, left, right):
    document_BS = document_ids(torch.ones(1, 9))
    given = inputs_of(document_BS)
    plain, *_ = attend(document_BS, degrees, kernel, given)
    padded_BS = torch.nn.functional.pad(document_BS, (left, right), value=-1)
    more = {name: torch.nn.functional.pad(t, (0, 0, left, right), value=7) for name, t in given.items()}
    padded, *_ = attend(padded_BS, degrees, kernel, more)
    assert all(padded[name][:, :, left : left + 9].equal(states) for name, states in plain.items())


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
    boxes = {(r, tag): SimpleQueue() for r in range(3) for tag in (0, 1)}
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
    boxes = {(r, tag): SimpleQueue() for r in range(ranks) for tag in (0, 1)}
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
    assert "Choose 1, 2, 3, 4, 6 or 12" in said

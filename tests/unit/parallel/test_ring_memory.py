"""What a ring holds at once is what its docstring says, whatever the number of ranks."""
# Shapes: N heads, C places of a rank, D head dim.

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glmv.parallel.dispatch import Traffic
from glmv.parallel.ring import Moving, Ring

HEADS, SHARED, DIM = 4, 2, 16


class Echo(Ring):
    """A rank whose neighbours send back what they get: wrong values in the right amount of memory."""

    def __init__(self, size, rank):
        self.size, self.rank, self.traffic = size, rank, Traffic()

    def pass_on(self, leaving, tag):
        return Moving(leaving.clone(), leaving, [])


class Held(TorchDispatchMode):
    """The most bytes that results hold at once; what is given is not counted."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(result) if torch.is_tensor(leaf)):
            if storage.data_ptr() not in given and id(storage) not in self.alive:
                self.alive[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, id(storage), None)
        self.most = max(self.most, sum(self.alive.values()))
        return result


def held(ranks, places, documents=1):
    """The most bytes that any rank holds in the forward pass, and in the backward pass."""
    shapes = [(1, heads, places, DIM) for heads in (HEADS, SHARED, SHARED)]
    most = []
    for rank in range(ranks):
        leaves = [torch.ones(shape, requires_grad=True) for shape in shapes]
        with Held() as forward:
            lengths = [places // documents] * documents
            output = Echo(ranks, rank).attend(*leaves, lengths, implementation="flash")
        grad = torch.ones_like(output)
        with Held() as backward:
            output.backward(grad)
        most.append((forward.most, backward.most))
    return tuple(map(max, zip(*most)))


@pytest.mark.parametrize("documents", [1, 4])
def test_it_does_not_grow_with_the_number_of_ranks(documents):
    assert held(4, 64, documents) == held(9, 64, documents)


def test_it_grows_with_the_places_of_a_rank_and_not_with_their_square():
    assert held(4, 256) == tuple(4 * most for most in held(4, 64))


def test_backward_holds_a_gradient_of_queries_five_blocks_and_the_result_of_a_kernel():
    query, block = HEADS * 64 * DIM * 4, 2 * SHARED * 64 * DIM * 4
    assert held(4, 64)[1] == query + 5 * block + max(query + block // 2, query // 2 + block)


def test_forward_holds_an_output_two_blocks_three_results_and_statistics():
    """Of one size here; statistics have no channels, and are less than another."""
    assert held(4, 64)[0] // (HEADS * 64 * DIM * 4) == 1 + 2 + 3

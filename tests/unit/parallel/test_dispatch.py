"""Rows in blocks that change places."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from glmv.parallel.dispatch import move_blocks

blocks = st.integers(0, 6).flatmap(
    lambda n: st.tuples(st.lists(st.integers(0, 4), min_size=n, max_size=n), st.permutations(range(n)))
)


@given(blocks)
def test_blocks_come_in_the_order_asked_for(drawn):
    sizes, order = drawn
    rows = list(range(sum(sizes)))
    ends = [sum(sizes[: block + 1]) for block in range(len(sizes))]
    expected = [row for block in order for row in rows[ends[block] - sizes[block] : ends[block]]]
    stood, goes = move_blocks(
        torch.tensor(sizes, dtype=torch.int64), torch.tensor(order, dtype=torch.int64), sum(sizes)
    )
    assert stood.tolist() == expected
    assert [expected[place] for place in goes.tolist()] == rows

"""Where copies of hot experts go: a plan that all ranks make alike from all counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glmv.parallel.balance import most_by_mean, place_copies

counts = st.tuples(st.integers(1, 5), st.integers(1, 3)).flatmap(
    lambda sizes: st.lists(
        st.lists(st.integers(0, 40), min_size=sizes[0] * sizes[1], max_size=sizes[0] * sizes[1]),
        min_size=sizes[0],
        max_size=sizes[0],
    )
)


def loads(counts_PE):
    """Rows of each rank without copies."""
    held = len(counts_PE[0]) // len(counts_PE)
    total_E = [sum(column) for column in zip(*counts_PE)]
    return [sum(total_E[rank * held :][:held]) for rank in range(len(counts_PE))]


def test_a_hot_expert_is_shared_out_evenly():
    copies = place_copies([[90, 6, 2, 2], [0] * 4], most=1)
    assert copies.slots == [[0, 1], [2, 3, 0]]
    assert copies.load() == [50, 50]
    assert copies.rows[0][0] == {0: 44, 1: 46}


def test_one_hot_expert_reaches_every_rank():
    copies = place_copies([[7, 0, 0, 0]] + [[0] * 4] * 3, most=2)
    assert copies.load() == [2, 2, 2, 1]


def test_the_borrowers_own_rows_move_first_and_then_those_of_the_rank_with_most():
    def sent(*rows):
        """What each rank sends of expert 0's rows where, if it has so many."""
        copies = place_copies([[count, 0, 0] for count in rows], most=1)
        return [{rank: n for rank, n in from_rank[0].items() if n} for from_rank in copies.rows]

    assert sent(1, 5, 9) == [{0: 1}, {1: 5}, {0: 4, 2: 5}]
    assert sent(3, 1, 8) == [{0: 3}, {1: 1}, {0: 1, 1: 3, 2: 4}]


def test_what_is_balanced_stays_at_home():
    copies = place_copies([[3, 4], [4, 3]], most=2)
    assert copies.slots == [[0], [1]]


@given(counts, st.integers(1, 3))
def test_every_row_goes_to_exactly_one_rank_that_has_its_expert(counts_PE, most):
    copies = place_copies(counts_PE, most)
    for source, from_rank in enumerate(copies.rows):
        for expert, split in enumerate(from_rank):
            assert sum(split.values()) == counts_PE[source][expert]
            assert all(rows >= 0 and (not rows or expert in copies.slots[rank]) for rank, rows in split.items())


@given(counts, st.integers(1, 3))
def test_a_rank_keeps_its_experts_and_borrows_no_more_than_allowed(counts_PE, most):
    held = len(counts_PE[0]) // len(counts_PE)
    for rank, experts in enumerate(place_copies(counts_PE, most).slots):
        assert experts[:held] == [*range(rank * held, (rank + 1) * held)]
        assert experts[held:] == sorted({*experts[held:]} - {*experts[:held]})
        assert len(experts) <= held + most


@given(counts, st.integers(1, 3))
def test_no_rank_gets_more_than_the_most_loaded_had(counts_PE, most):
    before, after = loads(counts_PE), place_copies(counts_PE, most).load()
    mean = -(-sum(before) // len(before))
    assert sum(after) == sum(before)
    assert all(rows <= max(was, mean) for was, rows in zip(before, after))


@given(counts)
def test_enough_copies_level_the_load(counts_PE):
    after = place_copies(counts_PE, most=100).load()
    assert max(after) == -(-sum(after) // len(after))


@pytest.mark.parametrize(("load", "figure"), [([4, 2, 0], 2.0), ([3, 3], 1.0), ([0, 0], 1.0)])
def test_the_most_loaded_rank_is_measured_by_the_mean(load, figure):
    assert most_by_mean(load) == figure

"""Who reads which samples when."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glmv.data import BatchSampler, DataError


def sampler(num_samples=10, micro=1, accumulation=1, dp_rank=0, dp_size=1, seed=3, shuffle=True, drop_last=True):
    return BatchSampler(
        num_samples,
        micro_batch_size=micro,
        accumulation=accumulation,
        dp_rank=dp_rank,
        dp_size=dp_size,
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
    )


def everyone(step, dp_size, **options):
    """The samples that all ranks read in a step, in the order of micro-batches, then ranks."""
    ranks = [sampler(dp_rank=rank, dp_size=dp_size, **options).step(step) for rank in range(dp_size)]
    return [index for at in range(len(ranks[0])) for rank in ranks for index in rank[at]]


def test_without_shuffling_samples_follow_the_file():
    ranks = [sampler(12, micro=2, accumulation=2, dp_rank=r, dp_size=2, shuffle=False) for r in range(2)]
    assert [rank.step(0) for rank in ranks] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_the_order_is_a_law_of_seed_and_epoch():
    assert [sampler(5, seed=3).step(i)[0][0] for i in range(10)] == [3, 2, 4, 1, 0, 1, 4, 0, 3, 2]


@pytest.mark.parametrize(("seed", "same"), [(3, True), (4, False)])
def test_the_seed_alone_decides_the_order(seed, same):
    # Samplers of their own, as in another process or after a restart.
    orders = [[sampler(40, seed=s).step(step) for step in range(40)] for s in (3, seed)]
    assert (orders[0] == orders[1]) is same


@pytest.mark.parametrize("accumulation", [1, 2])
def test_ranks_share_an_epoch_without_overlap(accumulation):
    read = [
        [
            index
            for step in range(12 // accumulation)
            for batch in sampler(24, accumulation=accumulation, dp_rank=rank, dp_size=2).step(step)
            for index in batch
        ]
        for rank in range(2)
    ]
    assert set(read[0]).isdisjoint(read[1])
    assert {*read[0], *read[1]} == set(range(24))


def test_seed_and_epoch_are_not_merely_added():
    orders = {
        (seed, epoch): tuple(everyone(i, 1, num_samples=40, seed=seed)[0] for i in range(epoch * 40, epoch * 40 + 40))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(set(orders.values())) == 16


layouts = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))


@settings(max_examples=40)
@given(st.integers(1, 40), layouts, st.integers(0, 9), st.booleans())
def test_every_rank_has_the_same_number_of_batches(num_samples, layout, step, shuffle):
    micro, accumulation, dp_size = layout
    for rank in range(dp_size):
        mine = sampler(num_samples, micro, accumulation, rank, dp_size, shuffle=shuffle, drop_last=False).step(step)
        assert [len(batch) for batch in mine] == [micro] * accumulation


@settings(max_examples=40)
@given(st.integers(1, 40), layouts)
def test_an_epoch_reads_every_sample_once(num_samples, layout):
    micro, accumulation, dp_size = layout
    size = micro * accumulation * dp_size
    read = Counter()
    for step in range(num_samples):  # num_samples steps are `size` whole epochs
        options = {"num_samples": num_samples, "micro": micro, "accumulation": accumulation, "drop_last": False}
        read.update(everyone(step, dp_size, **options))
    assert read == dict.fromkeys(range(num_samples), size)


@settings(max_examples=40)
@given(st.integers(12, 40), st.integers(0, 9))
def test_a_step_reads_the_same_samples_in_every_layout(num_samples, step):
    layouts = [(1, 1, 12), (1, 12, 1), (2, 3, 2), (3, 2, 2), (12, 1, 1)]
    chosen = {
        tuple(sorted(everyone(step, dp, num_samples=num_samples, micro=micro, accumulation=accumulation)))
        for micro, accumulation, dp in layouts
    }
    assert len(chosen) == 1


def test_drop_last_leaves_out_what_does_not_fill_a_step():
    epochs = [[everyone(epoch * 2 + half, 4, num_samples=10) for half in range(2)] for epoch in range(30)]
    for first, second in epochs:
        assert len({*first, *second}) == 8
    assert {index for epoch in epochs for half in epoch for index in half} == set(range(10))


def test_a_data_set_smaller_than_one_global_batch_is_told():
    with pytest.raises(DataError) as caught:
        sampler(3, micro=1, accumulation=2, dp_size=2)
    assert str(caught.value) == (
        "3 samples do not fill one global batch of 4 (micro_batch_size 1 x gradient_accumulation_steps 2 x 2 "
        "data-parallel ranks), and drop_last leaves out what does not fill one.\n"
        "Add samples, make the batch smaller, or set data.dataloader_param.drop_last to false."
    )


def test_without_drop_last_a_small_data_set_goes_round():
    assert set(everyone(0, 2, num_samples=3, accumulation=2, drop_last=False)) == {0, 1, 2}

"""Which rank holds which token of a shared sequence."""

import pytest
import torch
from context_cases import documents
from hypothesis import given
from hypothesis import strategies as st

from glmv.ops.documents import document_ids
from glmv.ops.loss import shift
from glmv.parallel.sequence import PADDING, Degrees, Partition, join
from spec.partition import sequence_parts

degrees = st.builds(Degrees, st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3]))


def every_part(document_BS, degrees):
    return [Partition.of(document_BS, degrees, rank) for rank in range(degrees.size)]


def part_of(target_BL, token):
    """Where a token stands in a rank's only row."""
    return target_BL[0].tolist().index(token)


def only(length):
    """One document without padding."""
    return document_ids(torch.ones(1, length))


@given(documents(), degrees)
def test_every_rank_holds_what_the_law_gives_it(document_BS, degrees):
    parts = [part.index_BL for part in every_part(document_BS, degrees)]
    assert torch.stack(parts).equal(sequence_parts(document_BS, degrees.ring, degrees.ulysses))


@given(documents(), degrees)
def test_every_token_is_held_once_and_the_batch_s_padding_never(document_BS, degrees):
    rows = torch.cat([part.index_BL for part in every_part(document_BS, degrees)], dim=1)
    for held_L, document_S in zip(rows, document_BS):
        assert sorted(held_L[held_L != PADDING].tolist()) == (document_S >= 0).nonzero().flatten().tolist()


@given(documents(), degrees)
def test_joining_undoes_splitting(document_BS, degrees):
    whole_BS = torch.arange(document_BS.numel()).view_as(document_BS) + 7
    parts = every_part(document_BS, degrees)
    joined = join([part.split(whole_BS, fill=-1) for part in parts], parts, fill=-5)
    assert joined.equal(whole_BS.masked_fill(document_BS < 0, -5))


@given(documents(), degrees)
def test_padding_stands_behind_its_document_on_every_ring_rank(document_BS, degrees):
    """So that a causal mask alone keeps it out of sight."""
    parts = torch.stack([part.index_BL for part in every_part(document_BS, degrees)])
    ring_RBC = parts.unflatten(0, (degrees.ring, degrees.ulysses)).transpose(1, 2).flatten(2)
    places = Partition.of(document_BS, degrees, 0).documents
    for piece in ring_RBC[..., : sum(places)].split(places, dim=-1):
        half = max(piece.shape[-1] // (1 if degrees.ring == 1 else 2), 1)
        for chunk in piece.split(half, dim=-1):
            assert bool(((chunk != PADDING).long().diff(dim=-1) <= 0).all())


def test_two_chunks_of_a_document_on_each_of_two_ring_ranks():
    held = [part.index_BL.tolist() for part in every_part(only(8), Degrees(ring=2))]
    assert held == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]


def test_ulysses_cuts_a_ring_rank_s_part_in_order():
    held = [part.index_BL.tolist() for part in every_part(only(12), Degrees(ring=2, ulysses=2))]
    assert held == [[[0, 1, 2]], [[9, 10, 11]], [[3, 4, 5]], [[6, 7, 8]]]


@pytest.mark.parametrize("length", [1, 3])
def test_a_document_shorter_than_the_degree_leaves_ranks_with_padding_alone(length):
    held = [part.index_BL for part in every_part(only(length), Degrees(ring=4))]
    assert sum(bool((index != PADDING).any()) for index in held) == length
    assert {index.shape for index in held} == {(1, 2)}


def test_a_batch_without_any_token_is_a_document_of_padding():
    empty = document_ids(torch.zeros(2, 5))
    assert {(part.index_BL.shape, part.documents) for part in every_part(empty, Degrees(2, 2))} == {((2, 1), (2,))}


def test_positions_of_three_rows_are_split_along_the_sequence():
    """Batch, components and sequence are all 3 long: no other dim would be noticed by its size."""
    positions_3BS = torch.arange(27).view(3, 3, 3)
    part = Partition.of(document_ids(torch.ones(3, 3)), Degrees(ulysses=3), 1)
    assert part.split(positions_3BS, fill=-1).equal(positions_3BS[..., 1:2])


def test_a_tensor_of_another_sequence_is_refused():
    with pytest.raises(ValueError, match=r"\[3, 1, 7\] does not end in batch and sequence \[1, 8\]"):
        Partition.of(only(8), Degrees(2), 0).split(torch.zeros(3, 1, 7), fill=0)


@pytest.mark.parametrize(("degrees", "label", "holder"), [(Degrees(ulysses=2), 4, 0), (Degrees(2), 6, 1)], ids=str)
def test_the_only_label_at_the_start_of_a_chunk_is_the_target_of_the_token_before(degrees, label, holder):
    labels_BS = torch.full((1, 8), -100)
    labels_BS[0, label] = 77
    targets = [part.split(shift(labels_BS), -100) for part in every_part(only(8), degrees)]
    assert [int((target == 77).sum()) for target in targets] == [int(rank == holder) for rank in range(2)]
    assert part_of(targets[holder], 77) == every_part(only(8), degrees)[holder].index_BL[0].tolist().index(label - 1)


def test_every_ring_rank_has_the_same_work():
    """Keys that the queries of a rank see, summed; 2 x ring divides the length."""
    work = [int((part.index_BL + 1).sum()) for part in every_part(only(48), Degrees(ring=4))]
    assert len(set(work)) == 1

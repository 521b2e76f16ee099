"""The vision tower's segments over ranks as threads."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from glmv.parallel.vision_parallel import SharedVision, deal
from glmv.verify.testing.threads import run_ranks

MERGE, PIXELS, WIDTH = 2, 6, 5
sizes = st.lists(st.integers(1, 30), max_size=8)


class Sums(torch.nn.Module):
    """Stands for a tower: a feature is its patches' sum, wherever they are computed, times a weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(1.0, PIXELS * WIDTH + 1).view(PIXELS, WIDTH).double())
        self.ran = []

    def black_picture(self, device):
        return torch.zeros(4, PIXELS, dtype=torch.float64), torch.tensor([[1, 2, 2]])

    def forward(self, pixels_NP, grid_thw):
        self.ran.append(grid_thw.tolist())
        return pixels_NP.unflatten(0, (-1, MERGE**2)).sum(1) @ self.weight


def pictures(grids):
    """Patches of these pictures."""
    patches = sum(t * h * w for t, h, w in grids)
    return torch.arange(patches * PIXELS, dtype=torch.float64).view(patches, PIXELS) / 8, torch.tensor(grids)


def shared(ranks, grids, takers):
    """On every rank: features, the tower's gradient where rank takers[m] alone uses feature m, and what it ran."""

    def rank_of(rank):
        tower, vision = Sums(), SharedVision(dist.group.WORLD, MERGE)
        features_MH = vision(tower, *pictures(grids))
        (features_MH * (torch.tensor(takers) == rank)[:, None]).square().sum().backward()
        return features_MH.detach(), tower.weight.grad, tower.ran, vision

    return run_ranks(ranks, rank_of)


GRIDS = {
    "one_picture": [[1, 4, 6]],
    "unlike_pictures": [[1, 2, 2], [1, 6, 8], [1, 2, 4]],
    "a_video": [[3, 2, 4], [1, 4, 4]],
    "equal_pictures": [[1, 4, 4]] * 5,
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", GRIDS)
def test_features_and_gradients_are_those_of_one_rank(case, ranks):
    grids, alone = GRIDS[case], Sums()
    truth = alone(*pictures(grids))
    truth.square().sum().backward()
    takers = [m % ranks for m in range(len(truth))]
    said = shared(ranks, grids, takers)
    assert all(features.equal(truth) for features, *_ in said)
    # Whole numbers of eighths: sums in any order are exact.
    assert sum(grad for _, grad, *_ in said).equal(alone.weight.grad)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("case", GRIDS)
def test_no_segment_is_computed_twice_and_idle_ranks_run_the_smallest_picture(case, ranks):
    segments = sorted([1, h, w] for t, h, w in GRIDS[case] for _ in range(t))
    said = shared(ranks, GRIDS[case], [0] * (sum(h * w for _, h, w in segments) // 4))
    busy = [grid for _, _, ran, vision in said if vision.segments for grid in ran[0]]
    assert sorted(busy) == segments
    assert all(ran == [[[1, 2, 2]]] for _, _, ran, vision in said if not vision.segments)
    assert sum(not vision.segments for *_, vision in said) == max(ranks - len(segments), 0)


def test_a_rank_without_a_segment_has_gradients_of_zeros():
    (_, first, *_), (_, second, *_) = shared(2, GRIDS["one_picture"], [1] * 6)
    assert first.any()
    assert second.equal(torch.zeros_like(second))


def test_what_is_sent_is_what_the_docstring_says():
    said = shared(3, GRIDS["unlike_pictures"], [0] * 15)
    assert {vision.traffic.bytes for *_, vision in said} == {2 * 2 * 12 * WIDTH * 8}


@given(sizes, st.integers(1, 5))
def test_every_segment_is_dealt_once(sizes, ranks):
    dealt = deal(sizes, ranks)
    assert sorted(n for own in dealt for n in own) == [*range(len(sizes))]


@given(sizes, st.integers(1, 5))
def test_no_rank_has_more_than_another_and_one_segment(sizes, ranks):
    loads = [sum(sizes[n] for n in own) for own in deal(sizes, ranks)]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_the_largest_are_dealt_first_and_ties_go_to_the_lower_rank():
    assert deal([4, 24, 8, 16], 2) == [[0, 1], [2, 3]]
    assert deal([5, 5, 5], 2) == [[0, 2], [1]]

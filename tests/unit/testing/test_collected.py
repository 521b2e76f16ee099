"""What ranks that collected unlike tests are told."""

import pytest

from glmv.verify.testing.torchrun import _difference


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (["b", "a"], "rank 3 collected the same tests as rank 0 in another order."),
        (["a"], "rank 3 collected other tests than rank 0; it has in addition [], it lacks ['b']."),
        (["a", "b", "c"], "rank 3 collected other tests than rank 0; it has in addition ['c'], it lacks []."),
    ],
)
def test_the_difference_is_named(theirs, said):
    assert _difference(3, theirs, ["a", "b"]) == said

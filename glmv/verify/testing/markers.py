"""What a test's markers ask for."""

from __future__ import annotations

import pytest

from glmv.verify.testing.npu import NPU
from glmv.verify.testing.pool import Kind

MARKERS = (
    "npu: runs on a real NPU, or where there is none on the emulated device",
    "world_size(n): runs on n ranks at once; each of them executes the test",
)
KIND = pytest.StashKey[Kind]()
# As pytest-timeout works it out from marker, option and ini file.
TIMEOUT = pytest.StashKey[float | None]()


def ranks_of(item: pytest.Item) -> int | None:
    """On how many ranks an item runs; None if it needs none.

    Raises:
        pytest.UsageError: the marker `world_size` has not exactly one positive number.
    """
    marker = item.get_closest_marker("world_size")
    if marker is None:
        return None if item.get_closest_marker("npu") is None else 1
    if len(marker.args) != 1 or not isinstance(marker.args[0], int) or marker.args[0] < 1 or marker.kwargs:
        raise pytest.UsageError(f"{item.nodeid}: the marker is world_size(n) with a number of ranks, not {marker.args}")
    return marker.args[0]


def kind_of(item: pytest.Item) -> Kind | None:
    """The ranks that an item runs on; None if it needs none. Tests with the marker `npu` need `NPU` in the stash."""
    ranks = ranks_of(item)
    if ranks is None:
        return None
    if item.get_closest_marker("npu") is None:
        return Kind(ranks, item.config.getoption("--device"), emulated=False)
    return Kind(ranks, "npu", item.config.stash[NPU].emulated)

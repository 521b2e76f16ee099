"""Tests by hypothesis on several ranks: all ranks see the same examples, and fail at the same one.

hypothesis decides from what an example did which one comes next, and runs a failing one again. On ranks that decide
by themselves the collectives of different examples would meet. So all draw from the same seed, compare what they drew,
and after every example each rank learns whether another one failed.
"""

from __future__ import annotations

import functools
import hashlib
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from glmv.verify.testing.board import Board
from glmv.verify.testing.rank import RANK

# Where an object stands in memory is no part of the example.
ADDRESS = re.compile(r"\b0x[0-9a-f]+")
# How long a rank whose example failed waits for the others, which may hang in a collective that it never joined.
PATIENCE_S = 10.0


class OtherRankFailedError(Exception):
    """The example failed on another rank, whose report says why."""


class Lockstep:
    """Keeps the examples of one test together; `wrap` its function before it runs."""

    def __init__(self, board: Board, rank: int, world_size: int, item: pytest.Item, number: int) -> None:
        self.board, self.rank, self.world_size = board, rank, world_size
        self.fixtures = set(getattr(item, "fixturenames", ()))
        self.prefix, self.example, self.alone = f"examples/{number}", 0, False

    def wrap(self, test: Callable[..., Any]) -> Any:  # noqa: ANN401 - a function with attributes
        """The test's function, agreeing before and after each example."""

        @functools.wraps(test)
        def example(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - whatever the test takes
            self.example += 1
            drawn = {name: value for name, value in kwargs.items() if name not in self.fixtures}
            self._compare(ADDRESS.sub("", repr(drawn)))
            error: BaseException | None = None
            try:
                test(*args, **kwargs)
            except BaseException as caught:
                error = caught
            self._agree(error)

        return example

    def _compare(self, drawn: str) -> None:
        if self.alone:
            return
        digests = self._exchange("drawn", hashlib.sha256(drawn.encode()).hexdigest())
        if len(set(digests)) > 1:
            pytest.fail(f"the ranks drew different examples; this one drew {drawn}", pytrace=False)

    def _agree(self, error: BaseException | None) -> None:
        if error is not None:
            self._tell_failure()
            raise error
        if self.alone:
            return
        failed = [rank for rank, said in enumerate(self._exchange("ended", "well")) if said != "well"]
        if failed:
            raise OtherRankFailedError(f"the example failed on rank {failed[0]}")

    def _tell_failure(self) -> None:
        """Say that the example failed here, and wait a little until the others are through with it."""
        self.board.put(self._key("ended", self.rank), "badly")
        deadline = time.monotonic() + PATIENCE_S
        while not self.alone and time.monotonic() < deadline:
            if all(self.board.get(self._key("ended", rank)) is not None for rank in range(self.world_size)):
                return
            time.sleep(0.002)
        self.alone = True

    def _exchange(self, what: str, mine: str) -> list[str]:
        self.board.put(self._key(what, self.rank), mine)
        return self.board.wait_for_ranks(*(self._key(what, rank) for rank in range(self.world_size)))

    def _key(self, what: str, rank: int) -> str:
        return f"{self.prefix}/{self.example}/{what}/{rank}"


def keep_in_step(item: pytest.Item) -> None:
    """Make a test by hypothesis fit for several ranks; any other is left alone."""
    rank = item.config.stash.get(RANK, None)
    handle = getattr(getattr(item, "obj", None), "hypothesis", None)
    if rank is None or rank.world_size == 1 or handle is None:
        return
    rank.board = rank.board or Board.of_launch()
    rank.tests += 1
    lockstep = Lockstep(rank.board, rank.rank, rank.world_size, item, rank.tests)
    # A parametrised test has one function for all its cases.
    test = getattr(handle.inner_test, "kept_in_step", handle.inner_test)
    handle.inner_test = lockstep.wrap(test)
    handle.inner_test.kept_in_step = test


def load_profile() -> None:
    """Before tests are imported: defaults of hypothesis that do not depend on time, a database or one rank alone."""
    import hypothesis

    hypothesis.settings.register_profile(
        "glmv-ranks",
        hypothesis.settings(),
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("glmv-ranks")

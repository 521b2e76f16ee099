"""The pools of one session: one for each number and kind of ranks, started when first needed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from glmv.verify.testing.child import cases_of
from glmv.verify.testing.markers import KIND, TIMEOUT
from glmv.verify.testing.pool import Kind, Pool
from glmv.verify.testing.template import ADDRESS, Template


class Pools:
    """Runs each item that has a `KIND` in the pool of that kind."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._template: Template | None = None
        self._pools: dict[Kind, Pool] = {}
        self._following: dict[str, str | None] = {}
        self._collected: list[str] = []

    def collected(self, item: pytest.Item) -> None:
        """Note an item before anything is deselected."""
        self._collected.append(item.nodeid)

    def plan(self, items: Sequence[pytest.Item]) -> None:
        """Note which item follows which in its pool."""
        last: dict[Kind, str] = {}
        for item in items:
            if (kind := item.stash.get(KIND, None)) is not None:
                if kind in last:
                    self._following[last[kind]] = item.nodeid
                last[kind] = item.nodeid
                self._following[item.nodeid] = None

    def run(self, item: pytest.Item) -> list[pytest.TestReport]:
        """The item's reports, one a phase."""
        kind, following = item.stash[KIND], self._following.get(item.nodeid)
        pool = self._pools.get(kind) or self._start(kind, item)
        reports = pool.run(item, following, item.stash.get(TIMEOUT, None), self._cases(item))
        if pool.broken or following is None:
            self._pools.pop(kind).close()
        return reports

    def _cases(self, item: pytest.Item) -> list[str] | None:
        """All cases of the item's function, unless single tests were asked for by their ids."""
        if any("::" in argument for argument in self.config.args):
            return None
        return cases_of(item.nodeid, self._collected)

    def _start(self, kind: Kind, item: pytest.Item) -> Pool:
        if kind.emulated:
            _build_emulated_npu()
        directory = self._directory(f"ranks-{kind}")
        pool = Pool(kind, self.config, self._address(), directory, item.nodeid.partition("::")[0])
        self._pools[kind] = pool
        return pool

    def _directory(self, name: str) -> Path:
        return self.config._tmp_path_factory.mktemp(name)  # type: ignore[attr-defined]

    def _address(self) -> str:
        if shared := os.environ.get(ADDRESS):
            return shared
        self._template = self._template or Template()
        return self._template.address

    def share_template(self) -> None:
        """Start the template for the workers of pytest-xdist, which inherit its address; it imports nothing yet."""
        os.environ[ADDRESS] = self._address()

    def close(self) -> None:
        """End all ranks, and the template if it is this session's own."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        if self._template is not None:
            self._template.stop()
            os.environ.pop(ADDRESS, None)


def _build_emulated_npu() -> None:
    """Compile what ranks will load: that takes minutes on a busy machine, and their time to start is not for it."""
    from glmv.verify.emulated_npu import EmulationError, build

    with contextlib.suppress(EmulationError):  # a rank says it again, in the report of its test
        build.cached_library()

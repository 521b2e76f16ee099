"""How killer tests ended: told line by line by the session that runs them, which may die before it has told all.

A fault must be seen by a test that ran. So nothing counts as red but what the session said to be: a red phase, a file
that could not be collected, or a test that had begun when the process died. A killer that was skipped, deselected or
never reached has seen nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

RED, GREEN, SKIPPED, NO_RESULT = "red", "green", "skipped", "no result"
FIRST_WRONG = re.compile(r"first wrong: ([^:\n]+)")


class Teller:
    """pytest plugin: says what becomes of each test while it happens.

    Args:
        tell: takes one JSON object.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self.tell = tell

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected."""
        if report.failed:
            self.tell({"uncollected": report.nodeid})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self.tell({"test": nodeid, "begins": True})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test has ended."""
        if report.failed or report.skipped or report.when == "call":
            end = RED if report.failed else SKIPPED if report.skipped else GREEN
            self.tell({"test": report.nodeid, "end": end, "first_wrong": FIRST_WRONG.findall(report.longreprtext)})

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """All phases of a test have ended."""
        self.tell({"test": nodeid, "begins": False})


@dataclass
class Ends:
    """What a session told.

    Attributes:
        tests: the end of each test that ran.   uncollected: files that could not be.
        running: the test that had begun and not ended, or None.
        first_wrong: what the parity grid called wrong first.   exit_code: None if the process died.
    """

    tests: dict[str, str] = field(default_factory=dict)
    uncollected: list[str] = field(default_factory=list)
    running: str | None = None
    first_wrong: list[str] = field(default_factory=list)
    exit_code: int | None = None

    @classmethod
    def read(cls, lines: Iterable[str]) -> Ends:
        """From JSON lines, of which the last may be cut off."""
        ends = cls()
        for line in lines:
            if line.endswith("\n"):
                ends._take(json.loads(line))
        return ends

    def _take(self, said: dict[str, Any]) -> None:
        match said:
            case {"uncollected": file}:
                self.uncollected.append(file)
            case {"test": test, "begins": begins}:
                self.running = test if begins else None
            case {"test": test, "end": end, "first_wrong": names}:
                self.tests[test] = RED if RED in (end, self.tests.get(test)) else end
                self.first_wrong += names
            case {"exit_code": code}:
                self.exit_code = code

    def of(self, killer: str) -> str:
        """How a killer ended: RED if one of its cases did, else what else is known of them."""
        ends = {end for test, end in self.tests.items() if _is_case(test, killer)}
        if self._crashed_in(killer) or self.could_not_import(killer):
            ends.add(RED)
        return next((end for end in (RED, GREEN, SKIPPED) if end in ends), NO_RESULT)

    def could_not_import(self, killer: str) -> bool:
        """Whether the killer's file could not be collected."""
        return killer.partition("::")[0] in self.uncollected

    def _crashed_in(self, killer: str) -> bool:
        return self.exit_code is None and self.running is not None and _is_case(self.running, killer)


def _is_case(test: str, killer: str) -> bool:
    return test == killer or test.startswith(f"{killer}[")

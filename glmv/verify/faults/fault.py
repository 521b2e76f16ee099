"""What a seeded fault is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Fault:
    """One line of the project, replaced.

    Attributes:
        id: short name, `area-what`.   file: relative to the repository root.
        line: the exact line without its indentation, found once in the file.   replacement: what stands there instead.
        sentence: what a user would suffer from.
        killers: node ids of tests (below the root) that must each turn red; a parametrised test may be named without
            its brackets, then one red case is enough.
        first: a regular expression for what the parity grid must name as first wrong, in one of its red cases; "" where
            no case of the grid is a killer.
    """

    id: str
    file: str
    line: str
    replacement: str
    sentence: str
    killers: tuple[str, ...]
    first: str = ""

    @property
    def path(self) -> Path:
        """The file."""
        return ROOT / self.file

    @property
    def module(self) -> str:
        """The module's dotted name."""
        return self.file.removesuffix(".py").replace("/", ".")

    def apply(self, source: str) -> str:
        """`source` with the fault in it.

        Raises:
            DeadFaultError: the line isn't there, or more than once.
        """
        lines = source.splitlines(keepends=True)
        places = [index for index, text in enumerate(lines) if text.strip() == self.line]
        if len(places) != 1:
            raise DeadFaultError(f"fault {self.id}: its line stands {len(places)} times in {self.file}: {self.line}")
        lines[places[0]] = lines[places[0]].replace(self.line, self.replacement)
        return "".join(lines)


class DeadFaultError(Exception):
    """The code moved away from under a fault: it proves nothing until its line is brought up to date."""

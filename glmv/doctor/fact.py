"""One thing that the doctor found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum


class State(StrEnum):
    """`absent` limits what can run; `broken` is to be mended; only `fatal` stops the CPU too."""

    good = "ok"
    absent = "absent"
    broken = "broken"
    fatal = "fatal"


@dataclass(frozen=True)
class Fact:
    """A line of the table.

    Attributes:
        part: heading that it stands under.   name: what was looked at.
        value: what was found.   note: the reason, or the way out.
    """

    part: str
    name: str
    value: str
    state: State = State.good
    note: str = ""

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self) | {"state": self.state.value}


Collector = Callable[[], Iterator[Fact]]


def collect(part: str, collector: Collector) -> list[Fact]:
    """All facts of one collector; one that raises is a finding itself, and keeps what it found before."""
    found: list[Fact] = []
    try:
        found.extend(collector())
    except Exception as error:  # the doctor never dies of what it looks at
        found.append(Fact(part, collector.__name__, f"{type(error).__name__}: {error}", State.broken))
    return found

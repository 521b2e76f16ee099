"""What a rank was doing, kept in a file of its own: a rank that was killed cannot say it any more."""

from __future__ import annotations

from pathlib import Path


class Journal:
    """One line for each beginning of a test's phase, written through at once."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open as long as the rank lives

    def write(self, event: str, nodeid: str) -> None:
        """Note that a phase ("setup", "call", "teardown") or "waiting" has begun."""
        self._file.write(f"{event}\t{nodeid}\n")


def last_entry(path: Path) -> str:
    """Where the rank was, in words."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if not lines:
        return "before it had begun a test"
    event, nodeid = lines[-1].split("\t", 1)
    return f"after {nodeid}" if event == "finished" else f"in the {event} of {nodeid}"

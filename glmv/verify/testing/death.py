"""How a rank ended that could not say so."""

from __future__ import annotations

import signal
from pathlib import Path

TAIL = 4000


def describe(exit_code: int, where: str, output: Path) -> str:
    """One paragraph: the signal or exit code, where the rank was, and the last it printed."""
    if exit_code < 0:
        how = f"was killed by {signal.Signals(-exit_code).name}"
    else:
        how = f"ended its process with exit code {exit_code}"
    printed = output.read_text(encoding="utf-8", errors="replace")[-TAIL:].strip() if output.exists() else ""
    return f"{how} {where}" + (f"; the last it printed:\n{printed}" if printed else "")

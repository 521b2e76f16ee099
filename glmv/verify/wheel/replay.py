"""Hands recorded operator calls to the real schemas and meta kernels, which accept or refuse each.

    python -m glmv.verify.wheel.replay recording.json

Exit code 0: all accepted. 1: some are refused; they are printed. 2: the wheel cannot be loaded here.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from glmv.errors import GlmvError
from glmv.verify.wheel.install import install
from glmv.verify.wheel.load import load
from glmv.verify.wheel.metadata import described
from glmv.verify.wheel.recording import RecordedCall, read_recording


@dataclass
class Replay:
    """What became of the calls.

    Attributes:
        accepted: by operator.   schema_only: of those, operators without a meta kernel, whose schema alone was asked.
        refused: one line a call, with what was given and what was said.
    """

    accepted: Counter[str] = field(default_factory=Counter)
    schema_only: set[str] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)


def replay(calls: list[RecordedCall]) -> Replay:
    """Call the wheel's operators on meta tensors; only where the wheel is loaded."""
    result = Replay()
    for call in calls:
        try:
            getattr(torch.ops.npu, call.op)(*call.args, **call.kwargs)
        except NotImplementedError:  # raised behind the schema, which has taken the arguments
            result.schema_only.add(call.op)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, AssertionError) as error:
            given = f"{described(call.args)} {dict(call.kwargs)}"
            result.refused.append(f"{call.op}{given}: {' '.join(str(error).split())}")
            continue
        result.accepted[call.op] += 1
    return result


def main(path: Path) -> int:
    """Print what became of the calls of a recording; returns the exit code."""
    calls = read_recording(path)
    load(install())
    result = replay(calls)
    for op, number in sorted(result.accepted.items()):
        print(f"{number:6} accepted  {op}{'  (schema only)' if op in result.schema_only else ''}")
    for line in result.refused:
        print(f"REFUSED  {line}")
    return 1 if result.refused or not calls else 0


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])))
    except GlmvError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)

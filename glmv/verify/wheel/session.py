"""What the process that runs `make conformance` and its child, which has the wheel loaded, tell each other."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

SITE, RECORDING, REPORT = "GLMV_WHEEL_SITE", "GLMV_WHEEL_RECORDING", "GLMV_WHEEL_REPORT"


@dataclass(frozen=True)
class Session:
    """Paths of the wheel, of the recorded training step (None: none could be made), and of the report to write."""

    site: Path
    recording: Path | None
    report: Path

    def environment(self) -> dict[str, str]:
        """The child's environment."""
        recording = {RECORDING: str(self.recording)} if self.recording else {}
        return os.environ | {SITE: str(self.site), REPORT: str(self.report)} | recording

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Session | None:
        """The session that this process is the child of; None in any other process."""
        if SITE not in environ:
            return None
        recording = environ.get(RECORDING)
        return cls(Path(environ[SITE]), Path(recording) if recording else None, Path(environ[REPORT]))


@dataclass
class Report:
    """Numbers of cases by operator, and everything on which contract and wheel differ."""

    torch_npu: str = ""
    schemas: int = 0
    meta_cases: dict[str, int] = field(default_factory=dict)
    autograd_cases: dict[str, int] = field(default_factory=dict)
    replayed_calls: dict[str, int] = field(default_factory=dict)
    without_meta_kernel: dict[str, str] = field(default_factory=dict)
    mismatches: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """As JSON, with the totals."""
        totals = {
            "meta_cases_total": sum(self.meta_cases.values()),
            "autograd_cases_total": sum(self.autograd_cases.values()),
            "replayed_calls_total": sum(self.replayed_calls.values()),
        }
        path.write_text(json.dumps(asdict(self) | totals, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Report:
        """What `write` wrote."""
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{key: value for key, value in found.items() if not key.endswith("_total")})

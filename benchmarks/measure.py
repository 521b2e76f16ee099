"""Interleaved timing of candidates, and the record of it: a table for a person and JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Watch:
    """Seconds by phase: wall, and of the CPU (all threads), which another job on the same cores does not add to."""

    device: torch.device
    wall: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._finish()
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self._finish()
        self.wall[name] = time.perf_counter() - wall
        self.cpu[name] = time.process_time() - cpu

    def _finish(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


@dataclass(frozen=True)
class Candidate:
    """Something to time: `run` fills the watch's phases. `limit` caps its repetitions."""

    name: str
    run: Callable[[Watch], None]
    limit: int | None = None


def interleave(candidates: Sequence[Candidate], repetitions: int, device: torch.device) -> dict[str, list[Watch]]:
    """Run the candidates in turns, each round beginning with another. Warm them up before."""
    watches: dict[str, list[Watch]] = {candidate.name: [] for candidate in candidates}
    for turn in range(repetitions):
        first = turn % len(candidates)
        for candidate in [*candidates[first:], *candidates[:first]]:
            if candidate.limit is None or turn < candidate.limit:
                watch = Watch(device)
                candidate.run(watch)
                watches[candidate.name].append(watch)
    return watches


def summarise(watches: Mapping[str, list[Watch]], phases: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    """By candidate and phase (and their sum, "total"): least and median wall seconds, least CPU seconds."""
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for name, runs in watches.items():
        summary[name] = {}
        for phase in [*phases, "total"]:
            parts = phases if phase == "total" else [phase]
            walls = [sum(run.wall[part] for part in parts) for run in runs]
            cpus = [sum(run.cpu[part] for part in parts) for run in runs]
            summary[name][phase] = {
                "min": min(walls),
                "median": statistics.median(walls),
                "cpu_min": min(cpus),
                "repetitions": len(runs),
            }
    return summary


def table(title: str, summary: Mapping[str, Mapping[str, Mapping[str, float]]], peer: str) -> Table:
    """Seconds by phase and candidate, and the peer's over the candidate's: above 1 the candidate is faster."""
    shown = Table("phase", "candidate", title=title, title_justify="left")
    for heading in ("least", "median", "least CPU", f"{peer} / this", "by CPU", "runs"):
        shown.add_column(heading, justify="right")
    for phase in next(iter(summary.values())):
        for name, by_phase in summary.items():
            own, other = by_phase[phase], summary[peer][phase]
            ratios = [f"{other[key] / own[key]:.2f}" for key in ("min", "cpu_min")]
            times = [seconds(own[key]) for key in ("min", "median", "cpu_min")]
            shown.add_row(phase, name, *times, *ratios, str(own["repetitions"]))
        shown.add_section()
    return shown


def seconds(value: float) -> str:
    """Three significant digits, in s or ms."""
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def machine(device: torch.device) -> dict[str, Any]:
    """Where and with what these figures were made."""
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {
        "date": date.today().isoformat(),
        "device": named,
        "processor": processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def processor() -> str:
    """The CPU's name where the system gives one."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def relative_l2(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference, in float64."""
    difference = torch.linalg.vector_norm(value.double() - reference.double())
    return float(difference / torch.linalg.vector_norm(reference.double()))


def save(benchmark: str, cases: Sequence[Mapping[str, Any]], out: Path | None) -> None:
    """Write the cases so far."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"benchmark": benchmark, "cases": list(cases)}, indent=2) + "\n", encoding="utf-8")

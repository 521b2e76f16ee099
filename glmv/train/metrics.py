"""What a run reports: the log line, metrics.jsonl, the progress bar and the closing summary. Rank 0 only."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, the same on every rank but for `time_ms`."""

    step: int
    """The iteration, counted from 1."""
    loss: float
    """The global batch's loss, normalised as `features.loss_cfg.loss_type` says."""
    lr: float
    """The learning rate that this step used."""
    grad_norm: float
    """The global gradient norm before clipping."""
    tokens: int
    """Valid targets of the global batch."""
    global_batch_size: int
    """Samples of the global batch."""
    consumed_samples: int
    """Samples since the beginning of the training, this step included."""
    time_ms: float
    """Wall time of the step on this rank, loading of its data included."""
    expert_load: float | None = None
    """With copies of hot experts: rows of the most loaded rank by the mean over ranks, had there been no copies."""
    expert_load_balanced: float | None = None
    """The same with the copies."""


def log_line(metrics: StepMetrics, train_iters: int, now: datetime) -> str:
    """The line that MindSpeed-MM prints for an iteration, byte for byte in its form."""
    return (
        f"[{now:%Y-%m-%d %H:%M:%S}] iteration {metrics.step:8d}/{train_iters:8d} | "
        f"consumed samples: {metrics.consumed_samples:12d} | "
        f"elapsed time per iteration (ms): {metrics.time_ms:.1f} | "
        f"learning rate: {metrics.lr:.6E} | "
        f"global batch size: {metrics.global_batch_size:5d} | "
        f"loss: {metrics.loss:.6E} | "
        f"grad norm: {metrics.grad_norm:.3f} |"
    )


class Reporter:
    """Reports a run on rank 0 and is silent elsewhere. A context manager: leaving it ends the progress bar.

    Args:
        active: True on rank 0.   train_iters: steps of the whole training.   log_interval: steps between log lines.
        directory: where metrics.jsonl goes; every step is written there whatever the log interval. None writes no file.
        resumed_at: last step of an earlier run that this one continues; 0 begins metrics.jsonl anew.
    """

    def __init__(
        self, *, active: bool, train_iters: int, log_interval: int, directory: Path | None, resumed_at: int = 0
    ) -> None:
        self.active = active
        self.train_iters = train_iters
        self.log_interval = log_interval
        self.path = None if directory is None else directory / METRICS_FILE
        self.resumed_at = resumed_at
        self.history: list[StepMetrics] = []
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.progress: Progress | None = None
        self.file: TextIO | None = None

    def __enter__(self) -> Self:
        if self.active:
            self.file = self._begin_file()
            if self.console.is_terminal:
                self.progress = _progress(self.console)
                self.task = self.progress.add_task("train", total=self.train_iters, completed=self.resumed_at)
                self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.progress is not None:
            self.progress.stop()
        if self.file is not None:
            self.file.close()

    def _begin_file(self) -> TextIO | None:
        """The file of metrics, with the lines of an earlier run before the steps that this one takes or repeats."""
        if self.path is None:
            return None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept: list[str] = []
        if self.resumed_at and self.path.is_file():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.resumed_at]
        file = self.path.open("w", encoding="utf-8")
        file.writelines(kept)
        return file

    def say(self, text: str) -> None:
        """Print a line of plain text."""
        if self.active:
            self.console.print(text, markup=False)

    def report(self, metrics: StepMetrics) -> None:
        """Record one step, and print its line where the interval says so (the last step always)."""
        self.history.append(metrics)
        if self.file is not None:
            print(json.dumps(dataclasses.asdict(metrics)), file=self.file, flush=True)
        if metrics.step % self.log_interval == 0 or metrics.step == self.train_iters:
            self.say(log_line(metrics, self.train_iters, datetime.now()))
        if self.progress is not None:
            self.progress.update(self.task, completed=metrics.step)

    def summary(self, checkpoint: Path | None) -> None:
        """Print what the run did. The first step is left out of the mean time: it pays for set-up."""
        if not self.history:
            self.say("nothing to train: the checkpoint has all steps already")
            return
        first, last = self.history[0], self.history[-1]
        timed = self.history[1:] or self.history
        seconds = sum(m.time_ms for m in timed) / 1000
        self.say(
            f"\ntrained     steps {first.step} to {last.step}, {sum(m.tokens for m in self.history)} target tokens\n"
            f"loss        {first.loss:.6f} -> {last.loss:.6f}\n"
            f"speed       {seconds * 1000 / len(timed):.1f} ms per step, "
            f"{sum(m.tokens for m in timed) / max(seconds, 1e-9):.1f} target tokens per second\n"
            f"{_experts(timed)}"
            f"checkpoint  {checkpoint or 'none (training.save is not set)'}\n"
            f"metrics     {self.path or 'none (training.save is not set)'}"
        )


def _experts(steps: Sequence[StepMetrics]) -> str:
    """A line of the summary, where hot experts were copied."""
    loads = [(m.expert_load, m.expert_load_balanced) for m in steps if m.expert_load and m.expert_load_balanced]
    if not loads:
        return ""
    before, after = (sum(column) / len(loads) for column in zip(*loads))
    return f"experts     most loaded rank {before:.2f} x mean, {after:.2f} x with copies of hot experts\n"


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)

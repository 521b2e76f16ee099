"""`glmv faults`."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from glmv.errors import GlmvError

app = typer.Typer(
    name="glmv faults",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Seeded faults: bugs put in on purpose, which named tests must see.",
)


def main() -> None:
    """Run the command line of this process."""
    try:
        app(prog_name="glmv faults")
    except GlmvError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def faults_command(context: typer.Context) -> None:
    """Seeded faults: `glmv faults list`, `glmv faults run [ID ...]`."""
    command = [sys.executable, "-m", "glmv.verify.faults", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command("list")
def list_command() -> None:
    """Print every fault: its id and what a user would suffer from."""
    from glmv.verify.faults.catalogue import FAULTS

    for fault in FAULTS:
        print(f"{fault.id:<32} {fault.sentence}")


@app.command("run")
def run_command(
    ids: Annotated[list[str] | None, typer.Argument(help="Faults to run; all if none is named.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = os.cpu_count() or 1,
    out: Annotated[Path | None, typer.Option(help="Also write the kill matrix as JSON.")] = None,
) -> None:
    """Run each fault's killer tests with the fault in place, and print who was killed by whom.

    Exit code 1 if a fault survives one of its killers, or if its line or a killer is gone.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from glmv.verify.faults.catalogue import FAULTS
    from glmv.verify.faults.run import Verdict, run_faults

    chosen = [fault for fault in FAULTS if not ids or fault.id in ids]
    unknown = set(ids or ()) - {fault.id for fault in FAULTS}
    if unknown:
        raise GlmvError(f"no such fault: {', '.join(sorted(unknown))}. `glmv faults list` names them all.")
    console = Console(stderr=True)

    def done(verdict: Verdict) -> None:
        progress.advance(task)
        if not console.is_terminal:  # a log shows no bar, and these runs are long
            print(f"{'ok ' if verdict.good else 'RED'} {verdict.fault}", file=sys.stderr, flush=True)

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("faults", total=len(chosen))
        verdicts = run_faults(chosen, jobs, done, control=not ids)
    for verdict in verdicts:
        print(f"{'ok ' if verdict.good else 'RED'}  {verdict.fault:<32} {verdict.dead}")
        for killer, end in verdict.outcomes.items():
            print(f"       {end:<9} {killer}")
        if verdict.located is not None:
            print(f"       {'named' if verdict.located else 'MISSED'} first wrong: {verdict.named or 'nothing'}")
    bad = [verdict.fault for verdict in verdicts if not verdict.good]
    if out is not None:
        rows = [{"good": verdict.good, **dataclasses.asdict(verdict)} for verdict in verdicts]
        out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if placed := [verdict for verdict in verdicts if verdict.located is not None]:
        right = sum(bool(verdict.located) for verdict in placed)
        print(f"the parity grid named the faulty place first for {right} of {len(placed)} faults")
    killed = sum(verdict.good for verdict in verdicts)
    print(f"{killed} of {len(chosen)} faults killed by every test that claims to" + (f"; look at {bad}" if bad else ""))
    raise typer.Exit(1 if bad else 0)

"""`glmv verify`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Buffers(StrEnum):
    """Values of `--buffers`."""

    fp32 = "fp32"
    bf16 = "bf16"


def verify_command(
    world_size: Annotated[int, typer.Option(min=1, help="Ranks to train on.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps, each judged.")] = 20,
    out: Annotated[Path, typer.Option(help="Where checkpoints, traces and the report go.")] = Path("report"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights and of the sample order.")] = 0,
    buffers: Annotated[Buffers, typer.Option(help="Rotary frequencies: exact, or rounded to bf16 as Megatron's.")] = (
        Buffers.fp32
    ),
) -> None:
    """Train a tiny GLM-4.5V on real pictures and judge every step of it against the law.

    Exit code 0: everything within budget. 1: something is over budget. 2: a stage could not run.
    """
    from rich.console import Console

    from glmv.verify.report import write_report
    from glmv.verify.run import Options, verify
    from glmv.verify.summary import summary, write_json

    options = Options(out=out, world_size=world_size, steps=steps, seed=seed, buffers=buffers.value)
    result = verify(options, Console(stderr=True))
    write_json(result, out / "verify.json")
    print(summary(result, write_report(result, out)))
    raise typer.Exit(1 if result.missed else 0)

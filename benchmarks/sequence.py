"""Attention of one sequence, forward and backward, by all ranks together: time against 1/N of one rank's.

torchrun --nproc-per-node 4 benchmarks/sequence.py --tokens 8192 --out sequence.json

Every rank times the whole as well (`alone`), at the same moment as the others, so that the cores are as busy. By CPU
time a rank that waits costs nothing: what is above 1/N there is work that sharing adds or leaves unbalanced.
"""
# Shapes: B batch (1), N heads, S tokens, L places of a rank, D head dim.

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from measure import DTYPES, Candidate, Watch, interleave, machine, save
from rich.console import Console
from rich.table import Table
from torch import Tensor

from glmv.config.parallel import ParallelConfig
from glmv.ops.attention import Visible, text_attention
from glmv.parallel.context_parallel import ContextParallel, VisibleInPart
from glmv.parallel.mesh import build_meshes
from glmv.parallel.process import Process, process_group

ALONE = "alone"
PHASES = ("forward", "backward")


class Whole:
    """The sequence on one rank."""

    def __init__(self, states: list[Tensor]) -> None:
        self.states = [part.clone().requires_grad_() for part in states]

    def attend(self) -> Tensor:
        return text_attention(*self.states, Visible(), implementation="flash")

    def timed(self, watch: Watch) -> None:
        dist.barrier()
        with watch.phase("forward"):
            output = self.attend()
        with watch.phase("backward"):
            output.backward(torch.ones_like(output))


class Shared(Whole):
    """This rank's part of it."""

    def __init__(self, states: list[Tensor], ring: int, ulysses: int, process: Process) -> None:
        config = ParallelConfig(ring_attention_size=ring, ulysses_parallel_size=ulysses)
        self.context = ContextParallel(build_meshes(config, process), merge=2)
        self.partition = self.context.partition_of(torch.zeros(1, states[0].shape[2], dtype=torch.int64))
        super().__init__([states_BNLD[:, :, self.partition.index_BL[0].clamp(min=0)] for states_BNLD in states])

    def attend(self) -> Tensor:
        return self.context.attend(*self.states, VisibleInPart(partition=self.partition), implementation="flash")


def candidates(states: list[Tensor], process: Process) -> dict[str, Whole]:
    """Alone, and every way to share among all ranks."""
    ranks, heads = process.world_size, states[0].shape[1]
    ways: dict[str, Whole] = {ALONE: Whole(states)}
    for ulysses in (n for n in range(1, ranks + 1) if ranks % n == 0 and heads % n == 0):
        name = " x ".join(f"{what} {n}" for what, n in (("ring", ranks // ulysses), ("ulysses", ulysses)) if n > 1)
        ways[name] = Shared(states, ranks // ulysses, ulysses, process)
    return ways


def slowest(seconds: float) -> float:
    """Collective: of all ranks."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def main(
    tokens: int = 8192,
    heads: int = 12,
    shared: Annotated[int, typer.Option(help="Key and value heads.")] = 4,
    head_dim: int = 128,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    repetitions: int = 3,
    device: str = "cpu",
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    """Time attention of one sequence on one rank and on all."""
    with process_group(device) as process:
        torch.manual_seed(7)
        sizes = (heads, shared, shared)
        states = [torch.randn(1, n, tokens, head_dim).to(process.device, DTYPES[dtype]) for n in sizes]
        ways = candidates(states, process)
        for way in ways.values():
            way.timed(Watch(process.device))
        runs = interleave(
            [Candidate(name, functools.partial(way.timed)) for name, way in ways.items()], repetitions, process.device
        )
        found = {}
        for name, watches in runs.items():
            wall, cpu = ([sum(getattr(w, kind)[p] for p in PHASES) for w in watches] for kind in ("wall", "cpu"))
            found[name] = {"wall": slowest(min(wall)), "cpu": slowest(min(cpu))}
        if process.is_main:
            show(found, process.world_size, f"{tokens} tokens, {heads} and {shared} heads of {head_dim}, {dtype}")
            sizes_of = {"tokens": tokens, "heads": heads, "shared": shared, "head_dim": head_dim, "dtype": dtype}
            save("sequence", [{"sizes": sizes_of, "machine": machine(process.device), "seconds": found}], out)


def show(found: dict[str, dict[str, float]], ranks: int, title: str) -> None:
    """Seconds of the slowest rank, and over 1/N of one that is alone: 1 is ideal."""
    table = Table("candidate", title=f"{ranks} ranks, {title}", title_justify="left")
    for heading in ("wall", "CPU", "CPU x ranks / alone"):
        table.add_column(heading, justify="right")
    for name, own in found.items():
        over = "" if name == ALONE else f"{own['cpu'] * ranks / found[ALONE]['cpu']:.2f}"
        table.add_row(name, f"{own['wall']:.2f} s", f"{own['cpu']:.2f} s", over)
    Console(width=None if sys.stdout.isatty() else 100).print(table)


if __name__ == "__main__":
    typer.run(main)

"""Head, loss and their gradients: over all logits at once, and in chunks. Time, and the most memory held at once.

python benchmarks/loss.py --out loss.json
"""
# Shapes: S tokens, H hidden, V vocab.

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from measure import DTYPES, Candidate, Watch, interleave, machine, relative_l2, save, summarise, table
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glmv.ops.chunked_loss import Targets, chunked_cross_entropy
from glmv.ops.loss import target_cross_entropy

PEER = "all logits"
PHASES = ("forward", "backward")
MIB = 2**20


class Held(TorchDispatchMode):
    """Bytes of all results that are alive, at most: what a device's allocator would count, but for buffers within one
    operator. On an accelerator it is the allocator that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        given = {
            tensor.untyped_storage().data_ptr() for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)
        }
        for tensor in (leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given and id(storage) not in self.alive:
                self.alive[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, id(storage), None)
        self.most = max(self.most, sum(self.alive.values()))
        return result


@dataclass
class Case:
    """One micro-batch of one row: the decoder's hidden states, the head's weight, targets at most positions."""

    hidden_BSH: Tensor
    weight_VH: Tensor
    target_BS: Tensor
    share_BS: Tensor

    @classmethod
    def draw(cls, tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> Case:
        torch.manual_seed(7)
        weight_VH = torch.randn(vocabulary, hidden) / hidden**0.5
        target_BS = torch.randint(vocabulary, (1, tokens))
        return cls(
            hidden_BSH=torch.randn(1, tokens, hidden).to(device, dtype).requires_grad_(),
            weight_VH=weight_VH.to(device, dtype).requires_grad_(),
            target_BS=target_BS.to(device),
            share_BS=torch.full((1, tokens), 1 / tokens, dtype=torch.float64),
        )

    def whole(self) -> Tensor:
        return target_cross_entropy(F.linear(self.hidden_BSH, self.weight_VH), self.target_BS, self.share_BS)

    def chunked(self, size: int) -> Tensor:
        return chunked_cross_entropy(self.hidden_BSH, self.weight_VH, Targets(self.target_BS, self.share_BS, size))

    def ways(self, sizes: list[int]) -> dict[str, Callable[[], Tensor]]:
        return {PEER: self.whole, **{f"chunks of {size}": lambda size=size: self.chunked(size) for size in sizes}}

    def forget(self) -> None:
        self.hidden_BSH.grad = self.weight_VH.grad = None

    def timed(self, loss_of: Callable[[], Tensor], watch: Watch) -> None:
        self.forget()
        with watch.phase("forward"):
            loss = loss_of()
        with watch.phase("backward"):
            loss.backward()

    def said(self, loss_of: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Loss and gradients; also a warm-up."""
        self.forget()
        loss = loss_of()
        loss.backward()
        assert self.hidden_BSH.grad is not None
        assert self.weight_VH.grad is not None
        return {"loss": loss.detach(), "hidden": self.hidden_BSH.grad, "weight": self.weight_VH.grad}

    def held(self, loss_of: Callable[[], Tensor]) -> int:
        """The most bytes that loss and gradients hold beside inputs and weight; both gradients are among them."""
        self.forget()
        gc.collect()
        if self.weight_VH.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss_of().backward()
            return torch.cuda.max_memory_allocated() - before
        with Held() as held:
            loss_of().backward()
        return held.most


def check(case: Case, ways: Mapping[str, Callable[[], Tensor]]) -> dict[str, dict[str, float]]:
    """Relative L2 of each candidate to the peer; those that compute different things are not compared."""
    truth, found = case.said(ways[PEER]), {}
    limit = 8 * torch.finfo(case.weight_VH.dtype).eps
    for name, loss_of in ways.items():
        found[name] = {key: relative_l2(value, truth[key]) for key, value in case.said(loss_of).items()}
        worst = max(found[name], key=found[name].__getitem__)
        if not found[name][worst] < limit:
            raise SystemExit(f"{name}: {worst} differs by {found[name][worst]:.1e} (relative L2)")
    return found


def memory_table(title: str, held: Mapping[str, int]) -> Table:
    """Bytes held by candidate, and the peer's over them: above 1 the candidate holds less."""
    shown = Table("candidate", title=title, title_justify="left")
    for heading in ("most held", f"{PEER} / this"):
        shown.add_column(heading, justify="right")
    for name, size in held.items():
        shown.add_row(name, f"{size / MIB:.1f} MiB", f"{held[PEER] / size:.2f}")
    return shown


def main(
    tokens: int = 1024,
    hidden: int = 512,
    vocabulary: int = 16384,
    chunk: Annotated[list[int], typer.Option(help="Tokens of a chunk; may be given again.")] = [64, 256, 1024],  # noqa: B006
    dtype: Annotated[list[str], typer.Option(help="fp32 or bf16; may be given again.")] = ["fp32", "bf16"],  # noqa: B006
    repetitions: int = 5,
    threads: Annotated[int, typer.Option(help="torch's threads; 0 leaves them as they are.")] = 0,
    device: str = "cpu",
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    """Time head and loss, and measure what they hold."""
    if threads:
        torch.set_num_threads(threads)
    where, cases, console = torch.device(device), [], Console(width=None if sys.stdout.isatty() else 100)
    for name in dtype:
        case = Case.draw(tokens, hidden, vocabulary, DTYPES[name], where)
        ways = case.ways(chunk)
        differences, held = check(case, ways), {way: case.held(loss_of) for way, loss_of in ways.items()}
        candidates = [Candidate(way, functools.partial(case.timed, loss_of)) for way, loss_of in ways.items()]
        before = machine(where)
        summary = summarise(interleave(candidates, repetitions, where), PHASES)
        sizes = {"tokens": tokens, "hidden": hidden, "vocabulary": vocabulary}
        record = {"sizes": sizes, "dtype": name, "machine": before, "seconds": summary, "held_bytes": held}
        cases.append(record | {"load_after": machine(where)["load_average"], "differences": differences})
        title = f"loss  {tokens} tokens, head [{vocabulary} x {hidden}], {name}, {device}"
        save("loss", cases, out)
        console.print(table(title, summary, PEER))
        console.print(memory_table(title, held))


if __name__ == "__main__":
    typer.run(main)

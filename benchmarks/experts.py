"""The block of routed experts, forward and backward: glmv, and transformers on the same weights and routing.

python benchmarks/experts.py --out experts.json
"""
# Shapes: T tokens, H hidden, K experts per token, E experts, I intermediate, F = 2I.

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from measure import DTYPES, Candidate, Watch, interleave, machine, relative_l2, save, summarise, table
from rich.console import Console
from torch import Tensor, nn
from transformers.models.glm4v_moe.configuration_glm4v_moe import Glm4vMoeTextConfig
from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeTextExperts

from glmv.ops.experts import experts
from glmv.ops.kernels import Kernels

PEER = "HF grouped_mm"
PHASES = ("forward", "backward")


@dataclass(frozen=True)
class Sizes:
    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int


@dataclass
class Case:
    """One block: inputs, and its weights in both layouts."""

    hidden_TH: Tensor
    index_TK: Tensor
    weight_TK: Tensor
    grad_TH: Tensor
    gate_up_EHF: Tensor
    down_EIH: Tensor
    hf: nn.Module

    @classmethod
    def draw(cls, sizes: Sizes, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
        """Random weights and tokens; scores are sigmoids, so experts get more or less but alike many tokens."""
        torch.manual_seed(seed)
        gate_up_EHF = torch.randn(sizes.experts, sizes.hidden, 2 * sizes.inner) / sizes.hidden**0.5
        down_EIH = torch.randn(sizes.experts, sizes.inner, sizes.hidden) / sizes.inner**0.5
        weight_TK, index_TK = torch.randn(sizes.tokens, sizes.experts).sigmoid().topk(sizes.top_k)
        hidden_TH, grad_TH = torch.randn(2, sizes.tokens, sizes.hidden)
        config = Glm4vMoeTextConfig(
            hidden_size=sizes.hidden,
            moe_intermediate_size=sizes.inner,
            n_routed_experts=sizes.experts,
            num_experts_per_tok=sizes.top_k,
        )
        config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            hf = Glm4vMoeTextExperts(config)
        hf.gate_up_proj = nn.Parameter(gate_up_EHF.mT.contiguous().to(device, dtype))
        hf.down_proj = nn.Parameter(down_EIH.mT.contiguous().to(device, dtype))
        return cls(
            hidden_TH=hidden_TH.to(device, dtype).requires_grad_(),
            index_TK=index_TK.to(device),
            weight_TK=(weight_TK / weight_TK.sum(1, keepdim=True)).to(device).requires_grad_(),
            grad_TH=grad_TH.to(device, dtype),
            gate_up_EHF=gate_up_EHF.to(device, dtype).requires_grad_(),
            down_EIH=down_EIH.to(device, dtype).requires_grad_(),
            hf=hf,
        )

    def glmv(self, grouped: bool) -> Tensor:
        weights = self.gate_up_EHF, self.down_EIH
        return experts(self.hidden_TH, self.index_TK, self.weight_TK, *weights, Kernels(grouped=grouped))

    def transformers(self, implementation: str) -> Tensor:
        module = copy.copy(self.hf)  # shares the parameters
        module.config = copy.copy(self.hf.config)
        module.config._experts_implementation = implementation
        return module(self.hidden_TH, self.index_TK, self.weight_TK)

    def leaves(self) -> list[Tensor]:
        return [self.hidden_TH, self.weight_TK, self.gate_up_EHF, self.down_EIH, *self.hf.parameters()]

    def forget(self) -> None:
        for leaf in self.leaves():
            leaf.grad = None

    def candidates(self, eager: bool) -> list[Candidate]:
        ways = {
            "glmv grouped": lambda: self.glmv(True),
            "glmv looped": lambda: self.glmv(False),
            PEER: lambda: self.transformers("grouped_mm"),
        }

        def timed(forward: Callable[[], Tensor], watch: Watch) -> None:
            self.forget()
            with watch.phase("forward"):
                output_TH = forward()
            with watch.phase("backward"):
                output_TH.backward(self.grad_TH)

        made = [Candidate(name, lambda watch, way=way: timed(way, watch)) for name, way in ways.items()]
        if eager:
            made.append(Candidate("HF eager", lambda watch: timed(lambda: self.transformers("eager"), watch), limit=1))
        return made

    def differences(self) -> dict[str, float]:
        """Relative L2 of glmv's output and gradients to those of transformers' grouped_mm."""
        found = []
        self.glmv(False)  # a warm-up, as the others get here
        for forward in (lambda: self.glmv(True), lambda: self.transformers("grouped_mm")):
            self.forget()
            output_TH = forward()
            output_TH.backward(self.grad_TH)
            found.append((output_TH.detach(), [leaf.grad for leaf in self.leaves()]))
        (ours, own), (theirs, other) = found
        pairs = {
            "output": (ours, theirs),
            "hidden": (own[0], other[0]),
            "top_k_weight": (own[1], other[1]),
            "gate_up": (own[2], other[4].mT),
            "down": (own[3], other[5].mT),
        }
        self.forget()
        return {name: relative_l2(*pair) for name, pair in pairs.items()}


def check(differences: dict[str, float], dtype: torch.dtype) -> None:
    """Candidates that compute different things are not compared."""
    worst = max(differences, key=differences.__getitem__)
    if not differences[worst] < 8 * torch.finfo(dtype).eps:
        raise SystemExit(f"{worst}: glmv and transformers differ by {differences[worst]:.1e} (relative L2)")


def main(
    tokens: Annotated[list[int], typer.Option(help="Tokens of a call; give it again for more cases.")] = [1024, 4096],  # noqa: B006
    dtype: Annotated[list[str], typer.Option(help="fp32 or bf16; may be given again.")] = ["fp32", "bf16"],  # noqa: B006
    hidden: int = 1024,
    inner: Annotated[int, typer.Option(help="Intermediate size of one expert.")] = 352,
    experts: int = 128,
    top_k: int = 8,
    repetitions: int = 5,
    threads: Annotated[int, typer.Option(help="torch's threads; 0 leaves them as they are.")] = 0,
    device: str = "cpu",
    eager: Annotated[bool, typer.Option(help="Time transformers' eager experts too, once.")] = True,
    eager_tokens: Annotated[int, typer.Option(help="The most tokens that eager is given.")] = 1024,
    seed: int = 7,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    """Time the block of routed experts."""
    if threads:
        torch.set_num_threads(threads)
    where, cases, console = torch.device(device), [], Console(width=None if sys.stdout.isatty() else 100)
    for name in dtype:
        for count in tokens:
            sizes = Sizes(count, hidden, inner, experts, top_k)
            case = Case.draw(sizes, DTYPES[name], where, seed)
            differences = case.differences()
            check(differences, DTYPES[name])
            candidates = case.candidates(eager and count <= eager_tokens)
            before = machine(where)
            summary = summarise(interleave(candidates, repetitions, where), PHASES)
            cases.append(
                {
                    "sizes": vars(sizes),
                    "dtype": name,
                    "machine": before,
                    "load_after": machine(where)["load_average"],
                    "seconds": summary,
                    "differences": differences,
                }
            )
            title = f"experts  {experts} of [{hidden} x {2 * inner}], top {top_k}, {count} tokens, {name}, {device}"
            save("experts", cases, out)
            console.print(table(title, summary, PEER))
            del case, candidates
            gc.collect()


if __name__ == "__main__":
    typer.run(main)

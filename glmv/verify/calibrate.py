"""Measure rounding noise and how much of its budget a healthy machine uses: `python -m glmv.verify.calibrate`.

For many seeds of weights and inputs, the machine's gradients are judged against the law on one process. The table
that comes out shows, for each class of tensors, how large noise is and how close the worst healthy tensor came to its
budget, and how far over it faulty gradients are: scaled, halved, rolled, transposed. It is docs/budgets.md.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor

from glmv.model import Glm4vMoeForConditionalGeneration, ModelConfig
from glmv.ops.loss import cross_entropy, shift
from glmv.tiny.make import make_tiny
from glmv.verify.budgets import CLASSES, FIGURES, classify
from glmv.verify.export import hub_tensors
from glmv.verify.judge import DRAWS, Noise, compare, mean_projection, overall_projection
from spec import layout
from spec.config import Config
from spec.model import Batch
from spec.numerics import Policy
from spec.train import Objective, contribution

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PATCH_VALUES = 3 * 2 * 14 * 14
Tensors = Mapping[str, Tensor]

# What a fault does to every gradient; each must be far over budget.
FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled by 1 %": lambda g: g * 1.01,
    "halved": lambda g: g / 2,
    "rolled by a row": lambda g: g.roll(1, 0),
    "transposed (square tensors)": lambda g: g.T if g.ndim == 2 and g.shape[0] == g.shape[1] else g,
}


@dataclass
class Calibration:
    """Everything measured under one dtype."""

    noise: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    used: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    faults: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    projections: list[tuple[float, float]] = field(default_factory=list)
    alarms: int = 0
    judged: int = 0


class Case:
    """A tiny model with the weights of one seed, a batch of that seed, and both sides' gradients on it."""

    def __init__(self, directory: Path, seed: int, tokens: int) -> None:
        make_tiny(directory, seed=seed, force=True)
        self.config = Config.from_hf(json.loads((directory / "config.json").read_text(encoding="utf-8")))
        self.model_config = ModelConfig.from_hf_dir(directory)
        self.weights = {name: t.float() for name, t in hub_tensors(directory).items()}
        self.batch = draw_batch(seed, tokens, self.model_config.text.vocab_size)

    def machine(self, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
        """(loss and gradients, expert choices) of the machine."""
        model = Glm4vMoeForConditionalGeneration(self.model_config)
        model.load_state_dict(layout.stacked(self.weights))
        model.to(dtype)
        chosen: dict[int, Tensor] = {}
        for index in range(self.config.text.first_k_dense_replace, self.config.text.num_hidden_layers):
            gate = model.get_submodule(f"model.language_model.layers.{index}.mlp.gate")
            gate.register_forward_hook(lambda _, __, out, i=index: chosen.update({i: out[0]}))
        batch, targets = self.batch, Objective.of([self.batch]).targets
        assert batch.labels is not None
        logits = model(
            batch.input_ids,
            attention_mask_BS=batch.attention_mask,
            mm_token_type_ids_BS=batch.mm_token_type_ids,
            pixel_values_NP=batch.pixel_values,
            image_grid_thw=batch.image_grid_thw,
        )
        share_BS = (shift(batch.labels) != -100).double() / targets
        cross_entropy(logits, batch.labels, share_BS).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return layout.per_expert(gradients), chosen

    def law(self, policy: Policy, chosen: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Gradients of the law on the machine's route."""
        objective = Objective.of([self.batch])
        return contribution(self.weights, self.batch, objective, self.config, policy, chosen).gradients


def draw_batch(seed: int, tokens: int, vocab_size: int) -> Batch:
    """A row of text with one image, random ids and pixels."""
    random = torch.Generator().manual_seed(seed)
    rows, columns = (2 * int(torch.randint(1, 4, (), generator=random)) for _ in range(2))
    image = rows * columns // 4
    input_ids = torch.randint(0, vocab_size, (1, tokens + image), generator=random)
    types = torch.zeros_like(input_ids)
    types[0, 3 : 3 + image] = 1
    labels = input_ids.masked_fill(types == 1, -100)
    labels[0, :2] = -100
    pixels = torch.randn(rows * columns, PATCH_VALUES, generator=random)
    return Batch(input_ids, torch.ones_like(input_ids), types, pixels, torch.tensor([[1, rows, columns]]), labels)


def measure(case: Case, dtype: torch.dtype, into: Calibration) -> None:
    """Judge one case, and the same case with each fault."""
    said, chosen = case.machine(dtype)
    truth, noise = case.law(Policy(torch.float64), chosen), Noise()
    for draw in range(DRAWS):
        noise.add(truth, drawn := case.law(Policy(dtype, draw=draw), chosen))
    into.projections.append((overall_projection(said, truth), overall_projection(drawn, truth)))
    for finding in compare(said, truth, noise, dtype):
        key = (classify(finding.name).name, finding.figure)
        into.used[key].append(finding.used)
        into.alarms += finding.used > 1
        into.judged += 1
    for name in truth:
        for figure in FIGURES:
            into.noise[classify(name).name, figure].append(noise.level(name, figure))
    for fault, change in FAULTS.items():
        broken = {name: change(g) for name, g in said.items()}
        into.faults[fault].append(compare(broken, truth, noise, dtype)[0].used)


def page(results: Mapping[str, Calibration], seeds: int, sizes: tuple[int, ...]) -> str:
    """The Markdown page."""
    return "\n".join(_lines(results, seeds, sizes)) + "\n"


def _lines(results: Mapping[str, Calibration], seeds: int, sizes: tuple[int, ...]) -> Iterator[str]:
    yield "# Budgets, measured"
    yield ""
    yield f"`python -m glmv.verify.calibrate --seeds {seeds}` wrote this page: {seeds} seeds of weights and inputs,"
    yield f"rows of {' and '.join(map(str, sizes))} text tokens with one image, the tiny model on one process, every"
    yield "gradient judged. `used` is the share of its budget that a healthy tensor took. The ratios and their reasons"
    yield "stand in `glmv/verify/budgets.py`."
    for dtype, found in results.items():
        yield ""
        yield f"## {dtype}: {found.alarms} false alarms in {found.judged} judged tensors"
        yield ""
        yield "| class | figure | ratio | noise, median | noise, largest | used, median | used, largest |"
        yield "|---|---|---|---|---|---|---|"
        for budget in CLASSES:
            for figure in FIGURES:
                noise, used = found.noise.get((budget.name, figure), []), found.used.get((budget.name, figure), [])
                cells = [budget.name, figure, f"{budget.ratio(figure):g}", _pair(noise, ".1e"), _pair(used, ".2f")]
                if noise or used:
                    yield f"| {' | '.join(cells)} |"
        yield ""
        yield "| fault in every gradient | used by the worst tensor, smallest over all seeds |"
        yield "|---|---|"
        for fault, used in found.faults.items():
            yield f"| {fault} | {min(used):.3g} |"
        said, drawn = zip(*found.projections, strict=True)
        for scale in (1.0, 1.01):
            mean = mean_projection([scale * (1 + p) - 1 for p in said], drawn, DTYPES[dtype])
            yield f"| scaled by {scale - 1:.0%}, mean over {len(said)} steps | {mean.used:.3g} |"


def _pair(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} | {max(values):{form}}" if values else "- | -"


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of weights and inputs.")] = 20,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("docs/budgets.md"),
) -> None:
    """Measure noise and used budgets of a healthy machine, and write the documented table."""
    torch.set_num_threads(1)
    sizes, results = (24, 96), {name: Calibration() for name in DTYPES}
    with tempfile.TemporaryDirectory() as directory:
        for seed in track(range(seeds), description="seeds", console=Console(stderr=True)):
            for tokens in sizes:
                case = Case(Path(directory) / "tiny", seed, tokens)
                for name, dtype in DTYPES.items():
                    measure(case, dtype, results[name])
    out.write_text(page(results, seeds, sizes), encoding="utf-8")
    alarms = sum(found.alarms for found in results.values())
    print(f"{out}: {alarms} false alarms in {sum(found.judged for found in results.values())} judged tensors")
    raise typer.Exit(1 if alarms else 0)


if __name__ == "__main__":
    typer.run(main)

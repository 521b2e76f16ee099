"""Judge a recorded run step by step, each from the candidate's own state before it (re-anchored truth)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from glmv.verify.explain import explain
from glmv.verify.judge import DRAWS, Finding, Noise, compare, mean_projection, overall_projection
from glmv.verify.owner import Layout, owner
from glmv.verify.routing import RoutingNoise, ScoreNoise, judge_margins, judge_share, margins, score_noise
from glmv.verify.trace import MicroBatch, Trace, TracedStep
from glmv.verify.updates import judge_update
from spec.config import Config
from spec.numerics import Policy
from spec.optimizer import Hyper, Schedule, learning_rate
from spec.router import Routing
from spec.train import Contribution, Objective, contribution

KINDS = ("loss", "gradients", "routing", "weights")


@dataclass(frozen=True)
class Recipe:
    """How the candidate was told to train. `buffers`: dtype its rotary frequencies are rounded to, None for exact."""

    config: Config
    schedule: Schedule
    hyper: Hyper
    dtype: torch.dtype
    layout: Layout
    loss_type: str = "per_token_loss"
    buffers: torch.dtype | None = None

    def policy(self, dtype: torch.dtype, draw: int | None = None) -> Policy:
        """The law's arithmetic in `dtype`, under this recipe."""
        return Policy(dtype, draw=draw, buffers=self.buffers)


@dataclass(frozen=True)
class StepVerdict:
    """One step's findings by kind, worst first; `explanation` if something missed.

    `projection` is the signed one of all gradients, which is judged again as a mean over the run.
    """

    step: int
    findings: dict[str, list[Finding]]
    loss: float
    law_loss: float
    projection: float
    explanation: str = ""

    @property
    def missed(self) -> list[Finding]:
        """Everything over budget."""
        return [finding for kind in KINDS for finding in self.findings[kind] if finding.used > 1]


@dataclass
class RunNoise:
    """Everything that noise draws over a run have shown."""

    gradients: Noise = field(default_factory=Noise)
    loss: Noise = field(default_factory=Noise)
    routing: RoutingNoise = field(default_factory=RoutingNoise)


@dataclass(frozen=True)
class _Answer:
    """What the law says of one step under one policy."""

    loss: Tensor
    gradients: dict[str, Tensor]
    routing: list[dict[int, Routing]]


@dataclass(frozen=True)
class Prepared:
    """One step's truth, and what noise draws on it showed; `score_noise` by draw, micro-batch and layer."""

    number: int
    truth: _Answer
    noise: Noise = field(default_factory=Noise)
    loss_noise: Noise = field(default_factory=Noise)
    score_noise: list[list[dict[int, ScoreNoise]]] = field(default_factory=list)
    projections: list[float] = field(default_factory=list)


def judge_run(
    trace: Trace, recipe: Recipe, pool: Executor, progress: Callable[[], None]
) -> tuple[list[StepVerdict], Finding]:
    """Verdicts of all recorded steps, in order, and one on the mean scale of all gradients over the run.

    Args:
        pool: steps are independent of each other, but for the pooled noise.   progress: called twice a step.
    """
    noise, prepared = RunNoise(), []
    # One draw a step is enough for a long run; a short one needs more, or its noise would be a guess.
    draws = -(-DRAWS // len(trace.steps))
    for future in as_completed([pool.submit(prepare, trace, recipe, number, draws) for number in trace.steps]):
        prepared.append(found := future.result())
        noise.gradients.merge(found.noise)
        noise.loss.merge(found.loss_noise)
        for micro_batch in chain.from_iterable(found.score_noise):
            noise.routing.add(micro_batch)
        progress()
    verdicts = []
    for judged in as_completed([pool.submit(judge_step, trace, recipe, step, noise) for step in prepared]):
        verdicts.append(judged.result())
        progress()
    drawn = [projection for step in prepared for projection in step.projections]
    mean = mean_projection([verdict.projection for verdict in verdicts], drawn, recipe.dtype)
    return sorted(verdicts, key=lambda verdict: verdict.step), mean


def prepare(trace: Trace, recipe: Recipe, number: int, draws: int) -> Prepared:
    """Run the law on one step: once in float64, and for each noise draw under the candidate's dtype."""
    step = trace.read(number)
    truth = _sum(_contributions(step, recipe, recipe.policy(torch.float64)))
    found = Prepared(number, truth)
    for count in range(draws):
        draw = _sum(_contributions(step, recipe, recipe.policy(recipe.dtype, draw=number * draws + count)))
        found.noise.add(truth.gradients, draw.gradients)
        found.loss_noise.add({"loss": truth.loss}, {"loss": draw.loss})
        routing = zip(step.micro_batches, truth.routing, draw.routing, strict=True)
        found.score_noise.append([score_noise(said, drawn, _real(micro)) for micro, said, drawn in routing])
        found.projections.append(overall_projection(draw.gradients, truth.gradients))
    return found


def judge_step(trace: Trace, recipe: Recipe, prepared: Prepared, noise: RunNoise) -> StepVerdict:
    """Hold one step of the candidate against its truth."""
    step, truth = trace.read(prepared.number), prepared.truth
    # Whatever the law trains must have been trained: a gradient that the run left out counts as zero, and is a miss.
    lost = {name: torch.zeros(g.shape) for name, g in truth.gradients.items() if name not in step.gradients}
    step = replace(step, gradients=step.gradients | lost)
    reported = torch.tensor(float(step.metrics["loss"]), dtype=torch.float64)
    wide = torch.promote_types(recipe.dtype, torch.float32)
    gradients = compare(step.gradients, truth.gradients, noise.gradients, recipe.dtype)
    loss = compare({"loss": reported}, {"loss": truth.loss}, noise.loss, wide)
    findings = {
        "loss": [finding for finding in loss if finding.name == "loss"],
        "gradients": gradients,
        "routing": list(_judge_routing(step, prepared, recipe, noise.routing)),
        "weights": list(_judge_weights(step, recipe)),
    }
    shapes = {name: t.shape for name, t in step.before.items()}
    ordered = {
        kind: [_located(f, shapes, recipe) for f in sorted(found, key=lambda f: f.used, reverse=True)]
        for kind, found in findings.items()
    }
    explanation = _explain(step, truth, recipe) if gradients[0].used > 1 else ""
    projection = overall_projection(step.gradients, truth.gradients)
    return StepVerdict(step.number, ordered, float(reported), float(truth.loss), projection, explanation)


def _contributions(step: TracedStep, recipe: Recipe, policy: Policy) -> Iterator[Contribution]:
    objective = Objective.of([micro.batch for micro in step.micro_batches], recipe.loss_type)
    for micro in step.micro_batches:
        yield contribution(step.before, micro.batch, objective, recipe.config, policy, micro.experts)


def _judge_routing(step: TracedStep, prepared: Prepared, recipe: Recipe, noise: RoutingNoise) -> Iterator[Finding]:
    flips: dict[int, int] = defaultdict(int)
    own = RoutingNoise()
    for number, (micro, said) in enumerate(zip(step.micro_batches, prepared.truth.routing, strict=True)):
        real, drawn = _real(micro), RoutingNoise()
        for draw in prepared.score_noise:
            drawn.add(draw[number])
            own.add(draw[number])
        found = judge_margins(micro.experts, said, drawn, noise, real, recipe.dtype)
        yield from (replace(finding, where=f"rank {micro.rank} {finding.where}") for finding in found)
        for layer, routing in said.items():
            flips[layer] += int((margins(routing, micro.experts[layer], real) > 0).sum())
    tokens = sum(int(_real(micro).sum()) for micro in step.micro_batches)
    for layer, count in flips.items():
        yield judge_share(layer, count, tokens, own.share(layer), noise)


def _judge_weights(step: TracedStep, recipe: Recipe) -> Iterator[Finding]:
    lr = learning_rate(step.number - 1, recipe.schedule)
    off = abs(float(step.metrics["lr"]) - lr) / max(lr, recipe.schedule.lr)
    yield Finding("learning rate", "relative", off, 8 * torch.finfo(torch.float64).eps)
    yield from judge_update(
        step.before,
        step.state_before,
        step.gradients,
        float(step.metrics["grad_norm"]),
        step.after,
        step.state_after,
        replace(recipe.hyper, lr=lr),
    )


def _located(finding: Finding, shapes: Mapping[str, torch.Size], recipe: Recipe) -> Finding:
    held = owner(finding.name, finding.where, shapes, recipe.layout)
    return replace(finding, where=f"{finding.where}, {held}") if held else finding


def _explain(step: TracedStep, truth: _Answer, recipe: Recipe) -> str:
    by_rank: dict[int, dict[str, Tensor]] = {}
    parts = _contributions(step, recipe, recipe.policy(torch.float64))
    for micro, part in zip(step.micro_batches, parts, strict=True):
        so_far = by_rank.get(micro.rank)
        by_rank[micro.rank] = {n: g if so_far is None else g + so_far[n] for n, g in part.gradients.items()}
    return explain(step.gradients, truth.gradients, by_rank)


def _sum(parts: Iterator[Contribution]) -> _Answer:
    first, *others = parts
    loss, gradients, routing = first.loss, first.gradients, [first.routing]
    for part in others:
        loss = loss + part.loss
        gradients = {name: g + part.gradients[name] for name, g in gradients.items()}
        routing.append(part.routing)
    return _Answer(loss, gradients, routing)


def _real(micro: MicroBatch) -> Tensor:
    return micro.batch.attention_mask.flatten() != 0

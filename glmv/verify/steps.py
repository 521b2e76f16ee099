"""Judge a recorded run step by step, each from the candidate's own state before it (re-anchored truth)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from glmv.verify.explain import explain, holding_rank
from glmv.verify.judge import Finding, Noise, compare
from glmv.verify.routing import RoutingNoise, judge_margins, judge_share, margins
from glmv.verify.trace import MicroBatch, Trace, TracedStep
from glmv.verify.updates import judge_update
from spec.config import Config
from spec.loss import count_targets
from spec.numerics import Policy
from spec.optimizer import Hyper, Schedule, learning_rate
from spec.router import Routing
from spec.train import Contribution, contribution

KINDS = ("loss", "gradients", "routing", "weights")


@dataclass(frozen=True)
class Recipe:
    """How the candidate was told to train."""

    config: Config
    schedule: Schedule
    hyper: Hyper
    dtype: torch.dtype
    world_size: int


@dataclass(frozen=True)
class StepVerdict:
    """One step's findings by kind, worst first, the law's loss, and an explanation if something missed."""

    step: int
    findings: dict[str, list[Finding]]
    loss: float
    law_loss: float
    explanation: str = ""

    @property
    def missed(self) -> list[Finding]:
        """Everything over budget."""
        return [finding for kind in KINDS for finding in self.findings[kind] if finding.used > 1]


@dataclass(frozen=True)
class _Truth:
    """The law's float64 answer for one step."""

    loss: Tensor
    gradients: dict[str, Tensor]
    routing: list[dict[int, Routing]]
    score_noise: list[dict[int, float]] = field(default_factory=list)


class RunJudge:
    """Collects noise over all steps of a run, then judges them against it."""

    def __init__(self, trace: Trace, recipe: Recipe, progress: Callable[[], None] = lambda: None) -> None:
        self.trace, self.recipe, self.progress = trace, recipe, progress
        self.noise, self.loss_noise = Noise(), Noise()
        self.routing_noise = RoutingNoise()

    def run(self) -> list[StepVerdict]:
        """Verdicts of all recorded steps, in order."""
        truths = {number: self._prepare(self.trace.read(number)) for number in self.trace.steps}
        return [self._judge(self.trace.read(number), truth) for number, truth in truths.items()]

    def _prepare(self, step: TracedStep) -> _Truth:
        truth = _sum(self._contributions(step, Policy(torch.float64)))
        draw = _sum(self._contributions(step, Policy(self.recipe.dtype, draw=step.number)))
        self.noise.add(truth.gradients, draw.gradients)
        self.loss_noise.add({"loss": truth.loss}, {"loss": draw.loss})
        routing = zip(step.micro_batches, truth.routing, draw.routing, strict=True)
        own = [self.routing_noise.add(said, drawn, _real(micro)) for micro, said, drawn in routing]
        self.progress()
        return replace(truth, score_noise=own)

    def _contributions(self, step: TracedStep, policy: Policy) -> Iterator[Contribution]:
        targets = sum(count_targets(_labels(micro)) for micro in step.micro_batches)
        for micro in step.micro_batches:
            part = contribution(step.before, micro.batch, targets, self.recipe.config, policy, micro.experts)
            trained = {name: g for name, g in part.gradients.items() if name in step.gradients}
            yield replace(part, gradients=trained)

    def _judge(self, step: TracedStep, truth: _Truth) -> StepVerdict:
        dtype = self.recipe.dtype
        reported = float(step.metrics["loss"])
        wide = torch.promote_types(dtype, torch.float32)
        loss = compare({"loss": torch.tensor(reported)}, {"loss": truth.loss}, self.loss_noise, wide)[:1]
        gradients = compare(step.gradients, truth.gradients, self.noise, dtype)
        routing = list(self._routing(step, truth))
        shapes = {name: t.shape for name, t in step.before.items()}
        findings = {"loss": loss, "gradients": gradients, "routing": routing, "weights": list(self._update(step))}
        ordered = {
            kind: [self._located(f, shapes) for f in sorted(found, key=lambda f: f.used, reverse=True)]
            for kind, found in findings.items()
        }
        verdict = StepVerdict(step.number, ordered, reported, float(truth.loss))
        self.progress()
        return replace(verdict, explanation=self._explain(step, truth)) if gradients[0].used > 1 else verdict

    def _routing(self, step: TracedStep, truth: _Truth) -> Iterator[Finding]:
        flips: dict[int, int] = defaultdict(int)
        tokens: dict[int, int] = defaultdict(int)
        for micro, said, own in zip(step.micro_batches, truth.routing, truth.score_noise, strict=True):
            real = _real(micro)
            found = judge_margins(micro.experts, said, own, self.routing_noise, real, self.recipe.dtype)
            yield from (replace(finding, where=f"rank {micro.rank} {finding.where}") for finding in found)
            for layer, routing in said.items():
                flips[layer] += int((margins(routing, micro.experts[layer], real) > 0).sum())
                tokens[layer] += int(real.sum())
        yield from (judge_share(layer, flips[layer], tokens[layer], self.routing_noise) for layer in flips)

    def _located(self, finding: Finding, shapes: Mapping[str, torch.Size]) -> Finding:
        rank = holding_rank(finding.name, finding.where, shapes, self.recipe.world_size)
        return finding if rank is None else replace(finding, where=f"{finding.where}, in the shard of rank {rank}")

    def _update(self, step: TracedStep) -> Iterator[Finding]:
        lr = learning_rate(step.number - 1, self.recipe.schedule)
        off = abs(float(step.metrics["lr"]) - lr) / max(lr, self.recipe.schedule.lr)
        yield Finding("learning rate", "relative", off, 8 * torch.finfo(torch.float64).eps)
        yield from judge_update(
            step.before,
            step.state_before,
            step.gradients,
            float(step.metrics["grad_norm"]),
            step.after,
            step.state_after,
            replace(self.recipe.hyper, lr=lr),
        )

    def _explain(self, step: TracedStep, truth: _Truth) -> str:
        by_rank: dict[int, Mapping[str, Tensor]] = {}
        for micro, part in zip(step.micro_batches, self._contributions(step, Policy(torch.float64)), strict=True):
            so_far = by_rank.get(micro.rank)
            by_rank[micro.rank] = (
                part.gradients if so_far is None else {n: g + so_far[n] for n, g in part.gradients.items()}
            )
        return explain(step.gradients, truth.gradients, by_rank)


def _sum(parts: Iterator[Contribution]) -> _Truth:
    first, *others = parts
    loss, gradients, routing = first.loss, first.gradients, [first.routing]
    for part in others:
        loss = loss + part.loss
        gradients = {name: g + part.gradients[name] for name, g in gradients.items()}
        routing.append(part.routing)
    return _Truth(loss, gradients, routing)


def _real(micro: MicroBatch) -> Tensor:
    return micro.batch.attention_mask.flatten() != 0


def _labels(micro: MicroBatch) -> Tensor:
    assert micro.batch.labels is not None, "a recorded micro-batch has labels"
    return micro.batch.labels

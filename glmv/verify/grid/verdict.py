"""Judge one case, and say which tensor went wrong first and who holds it.

A wrong exchange in the forward pass makes every gradient wrong, and a wrong gradient everything before it. So what is
wrong is sought in the order of computation: outputs of modules, loss, gradients from the head to the embeddings, norm,
weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from glmv.config.training import TrainingConfig
from glmv.parallel.process import Process
from glmv.train.trainer import Trainer
from glmv.verify.grid import machine
from glmv.verify.grid.cases import Case
from glmv.verify.grid.law import Law
from glmv.verify.judge import DRAWS, Finding, Noise, compare
from glmv.verify.owner import Layout, owner
from glmv.verify.routing import RoutingNoise, judge_margins, score_noise
from glmv.verify.trace import CopiesError, Trace, TracedStep
from glmv.verify.updates import judge_update
from spec.numerics import Policy
from spec.optimizer import Hyper

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
# Published names in the order in which a backward pass reaches their gradients; the layers' numbers count down.
BACKWARD = (
    r"^lm_head\.",
    r"language_model\.norm\.",
    r"language_model\.layers\.",
    r"embed_tokens",
    r"visual\.merger\.",
    r"visual\.(downsample|post_layernorm)",
    r"visual\.blocks\.",
    r"visual\.",
)
IN_LAYER = (
    r"experts\.\d+\.down|mlp\.down|attn\.proj",
    r"experts\.\d+\.|mlp\.(gate|up)_proj",
    r"shared_experts",
    r"mlp\.gate\.",
    r"post_attention_layernorm|norm2",
    r"o_proj|attn\.proj",
    r"[qkv]_proj|qkv",
    r"",
)


@dataclass(frozen=True)
class Miss:
    """Something over budget; `kind` says what of the tensor, `owner` who holds it."""

    kind: str
    finding: Finding
    owner: str = ""

    def __str__(self) -> str:
        return f"{self.kind} of {self.finding}" + (f", {self.owner}" if self.owner else "")


def judge_case(case: Case, law: Law, trainer: Trainer, trace: Trace, process: Process) -> list[Miss]:
    """Collective: everything over budget, what went wrong first in front; the same list on every rank."""
    found: list[list[Miss]] = [[]]
    if process.is_main:
        found = [_misses(case, law, trace, trainer.config.training)]
    dist.broadcast_object_list(found)
    if not found[0]:
        return []
    if any(miss.kind in ("loss", "choice") for miss in found[0]):
        # The step has changed the weights by now, so that the law too looks at the new ones.
        stepped = Law(trace.read(1).after, law.config)
        return _wrong_outputs(case, stepped, trainer, process) + found[0]
    return found[0]


def _misses(case: Case, law: Law, trace: Trace, training: TrainingConfig) -> list[Miss]:
    try:
        step = trace.read(1)
        return [*_judge_step(case, law, step), *_wrong_updates(case, step, training)]
    except CopiesError as error:
        return [Miss("copies", Finding(error.name, "ranks that should hold the same differ", 1.0, 0.0))]


def _judge_step(case: Case, law: Law, step: TracedStep) -> Iterator[Miss]:
    """Misses among routing, loss and gradients, in that order."""
    dtype, names = DTYPES[case.dtype], machine.names_of(case)
    choices = _pins(case, step)
    yield from _wrong_choices(case, law, step, dtype)
    truth, noise = law.reference(names, choices, case.loss, dtype)
    trained = {name for name in truth if name == "loss" or not _frozen(name, case)}
    said = {"loss": torch.tensor(float(step.metrics["loss"]), dtype=torch.float64), **step.gradients}
    # A gradient that the step left out counts as zero; one of a frozen weight counts as wrong.
    said |= {name: torch.zeros_like(truth[name]) for name in trained - said.keys()}
    for name in said.keys() - trained:
        yield Miss("gradient", Finding(name, "frozen, but has one", 1.0, 0.0), _owner(name, "", case, step))
    findings = compare(_only(said, trained), _only(truth, trained), noise, dtype)
    missed = [finding for finding in findings if finding.used > 1]
    yield from (Miss("loss", finding) for finding in missed if finding.name == "loss")
    wrong = [finding for finding in missed if finding.name not in ("loss", "all tensors")]
    for finding in sorted(wrong, key=lambda f: (*_backward_order(f.name), -f.used)):
        yield Miss("gradient", finding, _owner(finding.name, finding.where, case, step))
    yield from (Miss("gradients", finding) for finding in missed if finding.name == "all tensors")


def _pins(case: Case, step: TracedStep) -> list[Mapping[int, Tensor]]:
    """In float64 nothing is a near-tie: the law chooses for itself, and its answer serves every layout."""
    return [{} if case.dtype == "fp64" else micro.experts for micro in step.micro_batches]


def _wrong_choices(case: Case, law: Law, step: TracedStep, dtype: torch.dtype) -> Iterator[Miss]:
    """Experts that the routers preferred wrongly, by more than noise moves scores."""
    pooled = RoutingNoise()
    judged = []
    for micro, name, pin in zip(step.micro_batches, machine.names_of(case), _pins(case, step), strict=True):
        truth, draws = law.routing(name, pin, case.loss, dtype)
        own, real_T = RoutingNoise(), micro.batch.attention_mask.flatten() != 0
        for draw in draws:
            noise = score_noise(truth, draw, real_T)
            own.add(noise)
            pooled.add(noise)
        judged.append((micro, truth, own, real_T))
    for micro, truth, own, real_T in judged:
        for finding in judge_margins(micro.experts, truth, own, pooled, real_T, dtype):
            if finding.used > 1:
                yield Miss("choice", finding, f"on rank {micro.rank}")


def _wrong_updates(case: Case, step: TracedStep, training: TrainingConfig) -> Iterator[Miss]:
    """Norm, clipped update, new weights and moments, given the candidate's own gradients."""
    hyper = Hyper(
        lr=training.lr,
        beta1=training.adam_beta1,
        beta2=training.adam_beta2,
        eps=training.adam_eps,
        weight_decay=training.weight_decay,
        clip_grad=training.clip_grad,
    )
    norm = float(step.metrics["grad_norm"])
    if norm <= machine.CLIP:
        yield Miss("clipping", Finding("gradient norm", "not above clip_grad: nothing would be clipped", 1.0, 0.0))
    update = judge_update(step.before, step.state_before, step.gradients, norm, step.after, step.state_after, hyper)
    for finding in update:
        if finding.used > 1:
            yield Miss(finding.figure, finding, _owner(finding.name, finding.where, case, step))


def _wrong_outputs(case: Case, law: Law, trainer: Trainer, process: Process) -> list[Miss]:
    """Collective: the first module of each micro-batch whose output is wrong, the earliest in front."""
    dtype = DTYPES[case.dtype]
    wrong: list[tuple[int, Miss]] = []
    for name in machine.names_on(case, process.rank):
        seen, choices, places = machine.outputs(trainer.model, name, process.device)
        for position, finding in _judge_outputs(law, name, seen, choices, places, dtype):
            wrong.append((position, Miss("output", finding, f"on rank {process.rank}, micro-batch {name}")))
            break
    everyone: list[list[tuple[int, Miss]]] = [[]] * process.world_size
    dist.all_gather_object(everyone, wrong)
    return [miss for _, miss in sorted((pair for part in everyone for pair in part), key=lambda pair: pair[0])]


def _judge_outputs(
    law: Law,
    name: str,
    seen: Mapping[str, Tensor],
    choices: Mapping[int, Tensor],
    places: Tensor | None,
    dtype: torch.dtype,
) -> Iterator[tuple[int, Finding]]:
    """Findings over budget, in the order of the forward pass.

    Args:
        places: token of the batch at each place of this rank's part, -1 at padding; None where it has the whole batch.
    """
    real_T = law.real_tokens(name)
    token_P = torch.arange(len(real_T)).masked_fill(~real_T, -1) if places is None else places

    def at_places(tensor: Tensor) -> Tensor:
        rows = tensor.reshape(-1, tensor.shape[-1])
        return rows[token_P[token_P >= 0]] if len(rows) == len(real_T) else rows

    def of_machine(tensor: Tensor) -> Tensor:
        rows = tensor.reshape(-1, tensor.shape[-1])
        return rows[token_P >= 0] if len(rows) == len(token_P) else rows

    # Without a pin in a part: its choices are not the whole batch's. In float64 no near-tie needs one.
    pin = choices if places is None else {}
    raw = {key: value for key, value in law.outputs(name, pin, Policy(torch.float64)).items() if key in seen}
    mine = {key: of_machine(seen[key]) for key in raw}
    truth = {key: at_places(value) for key, value in raw.items()}
    # Features are spread over ranks by their own rule.
    kept = [key for key in raw if mine[key].shape == truth[key].shape and truth[key].numel()]
    noise = Noise()
    for draw in range(DRAWS):
        drawn = law.outputs(name, pin, Policy(dtype, draw=draw))
        noise.add(_only(truth, kept), {key: at_places(drawn[key]) for key in kept})
    found = {f.name: f for f in compare(_only(mine, kept), _only(truth, kept), noise, dtype) if f.used > 1}
    for position, key in enumerate(raw):
        if key in found:
            yield position, found[key]


def _frozen(name: str, case: Case) -> bool:
    patterns = (re.escape(p).replace(r"\{\*\}", r"\d+") for p in machine.FREEZE[case.freeze])
    return any(re.match(rf"{pattern}\.", name) for pattern in patterns)


def _only(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    kept = set(names)
    return {name: t for name, t in tensors.items() if name in kept}


def _backward_order(name: str) -> tuple[int, int, int]:
    part = next(i for i, pattern in enumerate(BACKWARD) if re.search(pattern, name))
    number = re.search(r"(?:layers|blocks)\.(\d+)\.", name)
    inner = next(i for i, pattern in enumerate(IN_LAYER) if re.search(pattern, name))
    return part, -int(number[1]) if number else 0, inner


def _owner(name: str, where: str, case: Case, step: TracedStep) -> str:
    shapes = {key: tensor.shape for key, tensor in step.before.items()}
    return owner(name, where, shapes, layout_of(case))


def layout_of(case: Case) -> Layout:
    """The case's meshes."""
    ep, efsdp, _ = case.sizes
    return Layout(case.ranks, case.shards, ep, efsdp)


def report(case: Case, misses: Sequence[Miss]) -> str:
    """What a failing case prints."""
    first, *others = misses
    lines = [f"first wrong: {first}"]
    lines += [f"   and then: {miss}" for miss in others[:8]]
    if len(others) > 8:
        lines.append(f"   and {len(others) - 8} more")
    lines.append(f'replay alone: pytest "tests/distributed/test_grid.py::test_parity[{case.id}]"')
    return "\n".join(lines)

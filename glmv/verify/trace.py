"""What a training run leaves for the judge: state and gradients of every step, and every rank's batches.

    state_0000.safetensors    weights, exp_avg, exp_avg_sq before step 1
    step_0001.safetensors     gradients of step 1, complete and not yet clipped
    step_0001.json            loss, gradient norm, learning rate as the run reported them
    step_0001_rank2.safetensors   micro-batches of rank 2 and the experts its routers chose
    state_0001.safetensors    after step 1 = before step 2

Whole tensors are gathered to rank 0: this is for small models.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from glmv.data.batch import Batch as MachineBatch
from glmv.train.metrics import StepMetrics
from glmv.train.observer import Observer
from glmv.train.trainer import Trainer
from spec.layout import per_expert
from spec.model import Batch
from spec.optimizer import State

GATE = re.compile(r"layers\.(\d+)\.mlp\.gate$")
# The machine has the law's document ids as a property.
BATCH_FIELDS = sorted(
    {f.name for f in dataclasses.fields(Batch)} & {*(f.name for f in dataclasses.fields(MachineBatch)), "document_ids"}
)


class Recorder(Observer):
    """Writes the trace of a run; every rank must have one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self.choices: list[dict[int, Tensor]] = []
        self.hooked = False

    def before_step(self, trainer: Trainer, step: int, micro_batches: Sequence[MachineBatch]) -> None:
        """Store this rank's inputs; before the first step also the starting state."""
        if not self.hooked:
            self._watch_routers(trainer.model)
            self._save_state(trainer, 0)
        self.choices.clear()
        self.batches = list(micro_batches)

    def after_backward(self, trainer: Trainer, step: int, loss: float) -> None:
        """Store complete gradients, and each rank's expert choices."""
        gradients = {n: whole(p.grad) for n, p in trainer.model.named_parameters() if p.grad is not None}
        if trainer.rank == 0:
            save_file(gradients, self.directory / f"step_{step:04d}.safetensors")
        self._save_inputs(self.directory / f"step_{step:04d}_rank{trainer.rank}.safetensors")

    def after_step(self, trainer: Trainer, step: int, metrics: StepMetrics) -> None:
        """Store the new state and what the run reported."""
        self._save_state(trainer, step)
        if trainer.rank == 0:
            path = self.directory / f"step_{step:04d}.json"
            path.write_text(json.dumps(dataclasses.asdict(metrics)), encoding="utf-8")

    def _watch_routers(self, model: nn.Module) -> None:
        layers = {int(m[1]): module for name, module in model.named_modules() if (m := GATE.search(name))}
        first = min(layers)
        for layer, gate in layers.items():

            def keep(_: nn.Module, __: object, output: tuple[Tensor, Tensor], layer: int = layer) -> None:
                if layer == first:
                    self.choices.append({})
                self.choices[-1][layer] = output[0].detach().clone()

            gate.register_forward_hook(keep)
        self.hooked = True

    def _save_state(self, trainer: Trainer, step: int) -> None:
        tensors = {f"weights/{name}": whole(t) for name, t in trainer.model.state_dict().items()}
        for name, parameter in trainer.model.named_parameters():
            memory = trainer.optimizer.state.get(parameter, {})
            for kind in ("exp_avg", "exp_avg_sq"):
                tensors[f"{kind}/{name}"] = whole(memory[kind] if kind in memory else torch.zeros_like(parameter))
        if trainer.rank == 0:
            save_file(tensors, self.directory / f"state_{step:04d}.safetensors")

    def _save_inputs(self, path: Path) -> None:
        tensors: dict[str, Tensor] = {}
        for number, (batch, choice) in enumerate(zip(self.batches, self.choices, strict=True)):
            fields = {name: getattr(batch, name) for name in BATCH_FIELDS}
            tensors |= {f"{number}/{name}": t.cpu().contiguous() for name, t in fields.items() if t is not None}
            tensors |= {f"{number}/experts/{layer}": index.cpu() for layer, index in choice.items()}
        save_file(tensors, path)


def whole(tensor: Tensor) -> Tensor:
    """All of a possibly sharded tensor, on the CPU, in memory of its own. Collective for a DTensor."""
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.cpu().contiguous().clone()


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of one rank, with the experts that the machine chose, by layer."""

    rank: int
    batch: Batch
    experts: dict[int, Tensor]


@dataclass(frozen=True)
class TracedStep:
    """One step of the candidate under published names. `metrics` is what the run reported."""

    number: int
    before: dict[str, Tensor]
    state_before: State
    micro_batches: list[MicroBatch]
    gradients: dict[str, Tensor]
    metrics: dict[str, Any]
    after: dict[str, Tensor]
    state_after: State


@dataclass(frozen=True)
class Trace:
    """A recorded run. Steps are read from disk when asked for."""

    directory: Path

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps that ended, from 1."""
        return sorted(int(path.stem[5:]) for path in self.directory.glob("step_????.json"))

    def weights(self, step: int) -> dict[str, Tensor]:
        """Weights and buffers after `step` (0: at the start), under the machine's names."""
        tensors = load_file(self.directory / f"state_{step:04d}.safetensors")
        return {n.removeprefix("weights/"): t for n, t in tensors.items() if n.startswith("weights/")}

    def read(self, number: int) -> TracedStep:
        """One step."""
        stem = self.directory / f"step_{number:04d}"
        before, state_before = self._state(number - 1)
        after, state_after = self._state(number)
        return TracedStep(
            number=number,
            before=before,
            state_before=state_before,
            micro_batches=self._micro_batches(number),
            gradients=per_expert(load_file(stem.with_suffix(".safetensors"))),
            metrics=json.loads(stem.with_suffix(".json").read_text(encoding="utf-8")),
            after=after,
            state_after=state_after,
        )

    def _state(self, step: int) -> tuple[dict[str, Tensor], State]:
        tensors = load_file(self.directory / f"state_{step:04d}.safetensors")
        parts: dict[str, dict[str, Tensor]] = {"weights": {}, "exp_avg": {}, "exp_avg_sq": {}}
        for key, tensor in tensors.items():
            kind, name = key.split("/", 1)
            parts[kind][name] = tensor
        published = {kind: per_expert(part) for kind, part in parts.items()}
        return published["weights"], State(step, published["exp_avg"], published["exp_avg_sq"])

    def _micro_batches(self, number: int) -> list[MicroBatch]:
        found = []
        pattern = f"step_{number:04d}_rank*.safetensors"
        for path in sorted(self.directory.glob(pattern), key=lambda path: int(path.stem.split("rank")[1])):
            tensors = load_file(path)
            for index in sorted({int(key.split("/")[0]) for key in tensors}):
                own = {k.split("/", 1)[1]: t for k, t in tensors.items() if k.startswith(f"{index}/")}
                experts = {int(k.split("/")[1]): t for k, t in own.items() if k.startswith("experts/")}
                batch = Batch(**{name: own.get(name) for name in BATCH_FIELDS})  # type: ignore[arg-type]
                found.append(MicroBatch(int(path.stem.split("rank")[1]), batch, experts))
        return found

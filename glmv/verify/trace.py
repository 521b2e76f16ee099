"""What a training run leaves for the judge: state and gradients of every step, and every rank's batches.

    state_0000_rank2.safetensors   rank 2's part of weights, exp_avg, exp_avg_sq before step 1
    grads_0001_rank2.safetensors   its part of the gradients of step 1, complete and not yet clipped
    input_0001_rank2.safetensors   its micro-batches, and the experts its routers chose for its tokens
    step_0001.json                 loss, gradient norm, learning rate as the run reported them
    state_0001_rank2.safetensors   after step 1 = before step 2

Every rank writes what it holds, with the place of each part in the whole tensor; nothing is sent between ranks.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from glmv.data.batch import Batch as MachineBatch
from glmv.errors import GlmvError
from glmv.parallel.context_parallel import context_of
from glmv.train.metrics import StepMetrics
from glmv.train.observer import Observer
from glmv.train.trainer import Trainer
from spec.layout import per_expert
from spec.model import Batch
from spec.optimizer import State

GATE = re.compile(r"layers\.(\d+)\.mlp\.gate$")
BATCH_FIELDS = sorted({f.name for f in dataclasses.fields(Batch)} & {f.name for f in dataclasses.fields(MachineBatch)})


class CopiesError(ValueError):
    """Two ranks hold different values of one element of the tensor `name`."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class RerouteError(GlmvError):
    """Recomputed activations are not those that the loss was computed from."""


class Recorder(Observer):
    """Writes the trace of a run; every rank must have one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self.choices: list[dict[int, Tensor]] = []
        self.hooked = False

    def before_step(self, trainer: Trainer, step: int, micro_batches: Sequence[MachineBatch]) -> None:
        """Remember this rank's inputs; before the first step also store the starting state."""
        if not self.hooked:
            self._watch_routers(trainer.model)
            self._save_state(trainer, 0)
        self.choices.clear()
        self.batches = list(micro_batches)

    def after_backward(self, trainer: Trainer, step: int, loss: float) -> None:
        """Store complete gradients, inputs and expert choices."""
        gradients = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
        save_parts(gradients, self.directory / f"grads_{step:04d}_rank{trainer.rank}.safetensors")
        self._save_inputs(trainer.model, self.directory / f"input_{step:04d}_rank{trainer.rank}.safetensors")

    def after_step(self, trainer: Trainer, step: int, metrics: StepMetrics) -> None:
        """Store the new state and what the run reported."""
        self._save_state(trainer, step)
        if trainer.rank == 0:
            path = self.directory / f"step_{step:04d}.json"
            path.write_text(json.dumps(dataclasses.asdict(metrics)), encoding="utf-8")

    def _watch_routers(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(lambda *_: self.choices.append({}))
        for name, module in model.named_modules():
            if gate := GATE.search(name):
                module.register_forward_hook(partial(self._keep_choice, layer=int(gate[1])))
        self.hooked = True

    def _keep_choice(self, _: nn.Module, __: object, output: tuple[Tensor, Tensor], *, layer: int) -> None:
        """Remember a router's choice. Asked again for the same micro-batch, it recomputes and must not change it."""
        index_TK = output[0].detach()
        chosen_TK = self.choices[-1].setdefault(layer, index_TK.clone())
        if not chosen_TK.equal(index_TK):
            raise RerouteError(f"layer {layer}: the recomputed forward pass chose other experts than the first one.")

    def _save_state(self, trainer: Trainer, step: int) -> None:
        tensors = {f"weights/{name}": t for name, t in trainer.model.state_dict().items()}
        for name, parameter in trainer.model.named_parameters():
            memory = trainer.optimizer.state.get(parameter, {})
            tensors |= {f"{kind}/{name}": memory[kind] for kind in ("exp_avg", "exp_avg_sq") if kind in memory}
        save_parts(tensors, self.directory / f"state_{step:04d}_rank{trainer.rank}.safetensors")

    def _save_inputs(self, model: nn.Module, path: Path) -> None:
        tensors: dict[str, Tensor] = {}
        context = context_of(model)
        for number, (batch, choice) in enumerate(zip(self.batches, self.choices, strict=True)):
            fields = {name: getattr(batch, name) for name in (*BATCH_FIELDS, "cu_seqlens")}
            tensors |= {f"{number}/{name}": t.cpu().contiguous() for name, t in fields.items() if t is not None}
            tensors |= {f"{number}/experts/{layer}": index.cpu() for layer, index in choice.items()}
            if context is not None:
                tensors[f"{number}/places"] = context.partition_of(batch.document_ids).index_BL
                tensors[f"{number}/group"] = torch.tensor(dist.get_rank() // context.degrees.size)
        save_file(tensors, path)


def save_parts(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Store this rank's part of each tensor, and where it stands: {name: [whole shape, offset of the part]}."""
    parts, places = {}, {}
    for name, tensor in tensors.items():
        offset: tuple[int, ...] = (0,) * tensor.ndim
        if isinstance(tensor, DTensor):
            _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        parts[name] = part.detach().cpu().clone(memory_format=torch.contiguous_format)
        places[name] = [list(tensor.shape), list(offset)]
    save_file(parts, path, metadata={"places": json.dumps(places)})


def load_whole(paths: Sequence[Path]) -> dict[str, Tensor]:
    """Put the parts of all ranks together.

    Raises:
        ValueError: some element is in no rank's part.   CopiesError: two ranks hold different values of one.
    """
    whole: dict[str, Tensor] = {}
    covered: dict[str, Tensor] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            places = json.loads(file.metadata()["places"])
            for name, (shape, offset) in places.items():
                part = file.get_tensor(name)
                where = tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))
                if name not in whole:
                    whole[name] = torch.empty(shape, dtype=part.dtype)
                    covered[name] = torch.zeros(shape, dtype=torch.bool)
                held, seen = whole[name][where], covered[name][where]
                if seen.any() and not torch.equal(held[seen], part[seen]):
                    raise CopiesError(f"{path.name}: {name} differs between ranks that should hold the same", name)
                held.copy_(part)
                seen.fill_(True)
    if missing := [name for name, seen in covered.items() if not seen.all()]:
        raise ValueError(f"no rank holds all of {', '.join(missing[:3])} ({len(missing)} tensors)")
    return whole


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
        tensors = load_whole(self._files("state", step))
        return {n.removeprefix("weights/"): t for n, t in tensors.items() if n.startswith("weights/")}

    def read(self, number: int) -> TracedStep:
        """One step."""
        # First, so that copies whose gradients differ are told as that and not as different new weights.
        gradients = per_expert(load_whole(self._files("grads", number)))
        before, state_before = self._state(number - 1)
        after, state_after = self._state(number)
        return TracedStep(
            number=number,
            before=before,
            state_before=state_before,
            micro_batches=self._micro_batches(number),
            gradients=gradients,
            metrics=json.loads((self.directory / f"step_{number:04d}.json").read_text(encoding="utf-8")),
            after=after,
            state_after=state_after,
        )

    def _files(self, kind: str, number: int) -> list[Path]:
        """One file a rank, in the order of ranks."""
        found = self.directory.glob(f"{kind}_{number:04d}_rank*.safetensors")
        return sorted(found, key=lambda path: int(path.stem.split("rank")[1]))

    def _state(self, step: int) -> tuple[dict[str, Tensor], State]:
        tensors = load_whole(self._files("state", step))
        parts: dict[str, dict[str, Tensor]] = {"weights": {}, "exp_avg": {}, "exp_avg_sq": {}}
        for key, tensor in tensors.items():
            kind, name = key.split("/", 1)
            parts[kind][name] = tensor
        published = {kind: per_expert(part) for kind, part in parts.items()}
        weights = published["weights"]
        fresh = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        return weights, State(step, fresh | published["exp_avg"], fresh | published["exp_avg_sq"])

    def _micro_batches(self, number: int) -> list[MicroBatch]:
        shared: dict[tuple[int, int], list[tuple[int, dict[str, Tensor]]]] = {}
        for path in self._files("input", number):
            rank, tensors = int(path.stem.split("rank")[1]), load_file(path)
            for index in sorted({int(key.split("/")[0]) for key in tensors}):
                own = {k.split("/", 1)[1]: t for k, t in tensors.items() if k.startswith(f"{index}/")}
                group = int(own["group"]) if "group" in own else rank
                shared.setdefault((group, index), []).append((rank, own))
        return [_micro_batch(parts) for parts in shared.values()]


def _micro_batch(parts: Sequence[tuple[int, dict[str, Tensor]]]) -> MicroBatch:
    """Of the tensors of every rank that had a part of it.

    Raises:
        ValueError: the ranks did not share one batch, or a token was the part of none of them, or of two.
    """
    rank, first = parts[0]
    for other, own in parts[1:]:
        if differing := [n for n in BATCH_FIELDS if n in first and not torch.equal(first[n], own[n])]:
            raise ValueError(f"ranks {rank} and {other} share a sequence, but differ in {', '.join(differing)}")
    fields = {name: first.get(name) for name in BATCH_FIELDS}
    batch = Batch(**fields, document_ids=packed_documents(first))  # type: ignore[arg-type]
    layers = [int(key.split("/")[1]) for key in first if key.startswith("experts/")]
    if "places" not in first:
        return MicroBatch(rank, batch, {layer: first[f"experts/{layer}"] for layer in layers})
    places = torch.cat([token_of_place(own["places"], batch.input_ids.shape[1]) for _, own in parts])
    held_T = places[places >= 0].bincount(minlength=batch.input_ids.numel())
    if not torch.equal(held_T, (batch.documents.flatten() >= 0).long()):
        raise ValueError(f"micro-batch of rank {rank}: a token was the part of no rank, of two, or was padding")
    joined = {layer: torch.cat([own[f"experts/{layer}"] for _, own in parts]) for layer in layers}
    return MicroBatch(rank, batch, {layer: _in_token_order(index, places, held_T) for layer, index in joined.items()})


def token_of_place(index_BL: Tensor, length: int) -> Tensor:
    """Of every place of a rank's part the token of the flattened batch [B * S] that stands there, -1 at padding."""
    row_B1 = torch.arange(len(index_BL))[:, None]
    return torch.where(index_BL >= 0, row_B1 * length + index_BL, -1).flatten()


def _in_token_order(index_PK: Tensor, place_P: Tensor, held_T: Tensor) -> Tensor:
    """Expert choices [T, K] from those at all places; tokens that no rank held get the first K experts."""
    index_TK = torch.arange(index_PK.shape[1]).expand(len(held_T), -1).clone()
    index_TK[place_P[place_P >= 0]] = index_PK[place_P >= 0]
    return index_TK


def packed_documents(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The law's document ids [1, S] of a packed row, read from its borders and not from the machine; None without."""
    if "cu_seqlens" not in tensors:
        return None
    document_1S = torch.full_like(tensors["input_ids"], -1)
    for number, (begin, end) in enumerate(pairwise(tensors["cu_seqlens"].tolist())):
        document_1S[0, begin:end] = number
    return document_1S

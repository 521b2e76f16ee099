"""One case on the ranks: the real trainer takes one recorded step on the grid's micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import glmv
from glmv.checkpoint.hf_to_dcp import hf_to_dcp
from glmv.config import Config, load_config
from glmv.data import Batch
from glmv.parallel.context_parallel import context_of
from glmv.parallel.process import Process
from glmv.tiny.make import make_tiny
from glmv.train.trainer import Trainer
from glmv.verify.grid.batches import micro_batch
from glmv.verify.grid.cases import Case
from glmv.verify.trace import GATE, Recorder, token_of_place

TRAIN = Path(glmv.__file__).parents[1] / "examples" / "pictures" / "train.yaml"
# The micro-batches of a step, in the order of ranks and accumulation: pictures of different shapes, text alone, videos,
# packed documents, uneven numbers of targets, none at all.
NAMES = (
    "video_beside_pictures",
    "packed",
    "text",
    "pictures",
    "mixed_lengths",
    "ten",
    "picture",
    "masked_picture",
)
HOT = 4  # experts that `skewed` routing leaves to choose among
CLIP = 0.05  # below every gradient norm of the grid, so that clipping is always active
FREEZE = {
    "nothing": [],
    "vision": ["model.visual"],
    "embedding": ["model.language_model.embed_tokens"],
    "experts": ["model.language_model.layers.{*}.mlp.experts"],
}
RECOMPUTED = ["model.visual.blocks.{*}", "model.language_model.layers.{*}"]


def names_of(case: Case) -> list[str]:
    """The micro-batches of a case's step, over ranks and accumulation."""
    count = case.data_ranks * int(case.accumulate)
    return [NAMES[index % len(NAMES)] for index in range(count)]


def names_on(case: Case, rank: int) -> list[str]:
    """The micro-batches of one rank, in the order of accumulation."""
    each, group = int(case.accumulate), rank * case.data_ranks // case.ranks
    return names_of(case)[group * each : (group + 1) * each]


def write_models(directory: Path) -> None:
    """The tiny model under both routings, as Hugging Face directories `hf-*` and checkpoints `dcp-*`."""
    for routing in ("even", "skewed"):
        hub = make_tiny(directory / f"hf-{routing}")
        if routing == "skewed":
            _make_hot(hub)
        hf_to_dcp(hub, directory / f"dcp-{routing}")


def _make_hot(hub: Path) -> None:
    for path in hub.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if name.endswith("e_score_correction_bias"):
                tensors[name][:HOT] += 4  # scores lie between 0 and 1
        save_file(tensors, path, metadata={"format": "pt"})


def config_of(case: Case, models: Path, out: Path) -> Config:
    """What a user would write to get this case."""
    ep, efsdp, _ = case.sizes
    dispatcher = "alltoall" if case.exchange in ("none", "balance") else case.exchange
    hub, dcp = models / f"hf-{case.routing}", models / f"dcp-{case.routing}"
    return load_config(
        TRAIN,
        [
            f"data.dataset_param.preprocess_parameters.model_name_or_path={hub}",
            f"model.model_name_or_path={hub}",
            f"model.freeze={FREEZE[case.freeze]}",
            f"parallel.fully_shard_parallel_size={case.shards}",
            f"parallel.fsdp_plan.param_dtype={case.dtype}",
            f"parallel.fsdp_plan.reduce_dtype={'fp64' if case.dtype == 'fp64' else 'fp32'}",
            f"parallel.expert_parallel_size={ep}",
            f"parallel.expert_fully_shard_parallel_size={efsdp}",
            f"parallel.ep_plan.dispatcher={dispatcher}",
            f"parallel.ulysses_parallel_size={case.degrees[0]}",
            f"parallel.ring_attention_size={case.degrees[1]}",
            f"features.enable_chunk_loss={str(case.head == 'chunks').lower()}",
            "features.chunkloss_plan.chunk_size=5",
            f"features.enable_dynamic_chunk_loss={str(case.head == 'dynamic').lower()}",
            "features.chunkloss_plan.total_chunk_size=7",
            f"features.enable_ep_balance={str(case.exchange == 'balance').lower()}",
            f"features.recompute={str(case.recompute != 'off').lower()}",
            f"features.recompute_plan.apply_modules={RECOMPUTED}",
            f"features.recompute_plan.use_reentrant={str(case.recompute == 'reentrant').lower()}",
            f"features.loss_cfg.loss_type={case.loss}",
            f"training.gradient_accumulation_steps={case.accumulate}",
            f"training.clip_grad={CLIP}",
            "training.lr_warmup_ratio=0",
            "training.lr_decay_style=constant",
            f"training.load={dcp}",
            f"training.save={out}",
        ],
    )


@dataclass(frozen=True)
class GridBatches:
    """This rank's share of a case's micro-batches, the same in every step."""

    names: Sequence[str]

    def step(self, step: int) -> list[Batch]:
        """All of them."""
        return [micro_batch(name) for name in self.names]

    def __str__(self) -> str:
        return f"the grid's {', '.join(self.names)}"


class Watcher(Recorder):
    """A recorder that also sees what the head returned.

    Attributes:
        head_dims: numbers of dims of the head's outputs: 3 for logits, 0 for a loss.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.head_dims: set[int] = set()

    def before_step(self, trainer: Trainer, step: int, micro_batches: Sequence[Batch]) -> None:
        """Watch the head from the first step on."""
        if not self.hooked:
            trainer.model.lm_head.register_forward_hook(lambda _, __, output: self.head_dims.add(output.ndim))
        super().before_step(trainer, step, micro_batches)


def run(case: Case, models: Path, out: Path, process: Process) -> Trainer:
    """Collective: take one step and leave its trace below `out`; the trainer is returned for a closer look."""
    batches = GridBatches(names_on(case, process.rank))
    trainer = Trainer(config_of(case, models, out), Watcher(out / "trace"), batches=batches)
    trainer.train_step(1)
    dist.barrier()
    return trainer


def outputs(
    model: nn.Module, name: str, device: torch.device
) -> tuple[dict[str, Tensor], dict[int, Tensor], Tensor | None]:
    """Collective: what each module returns on a micro-batch, in a forward pass of its own.

    Returns:
        Outputs by module, experts chosen by layer, and which tokens they are of, where this rank has a part of them.
    """
    seen: dict[str, Tensor] = {}
    choices: dict[int, Tensor] = {}
    hooks = []
    for module_name, module in model.named_modules():

        def keep(_: nn.Module, __: object, output: object, module_name: str = module_name) -> None:
            if isinstance(output, Tensor):
                seen.setdefault(module_name, output.detach().cpu())
            elif gate := GATE.search(module_name):
                choices.setdefault(int(gate[1]), output[0].cpu())  # type: ignore[index]

        hooks.append(module.register_forward_hook(keep))
    with torch.no_grad():
        model(**micro_batch(name).to(device).model_inputs())
    for hook in hooks:
        hook.remove()
    context, batch = context_of(model), micro_batch(name)
    if context is None:
        return seen, choices, None
    index_BL = context.partition_of(batch.document_ids).index_BL
    return seen, choices, token_of_place(index_BL, batch.input_ids.shape[1])

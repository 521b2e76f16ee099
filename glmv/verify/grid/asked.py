"""Does the trainer have what the case asks for? A case that silently ran as another would prove nothing."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import DTensor

from glmv.model.moe import Experts
from glmv.parallel.balance import BalancedAllToAll
from glmv.parallel.context_parallel import context_of
from glmv.parallel.dispatch import AllGather, AllToAll
from glmv.parallel.mc2 import Mc2
from glmv.train.recompute import Recomputed
from glmv.train.trainer import Trainer
from glmv.verify.grid.cases import Case
from glmv.verify.grid.machine import Watcher

EXCHANGES = {
    "none": type(None), "alltoall": AllToAll, "allgather": AllGather, "balance": BalancedAllToAll, "mc2": Mc2
}  # fmt: skip


def lacking(case: Case, trainer: Trainer) -> list[str]:
    """What a trainer that has taken a step lacks of its case, in words."""
    model = trainer.model
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    return [
        *_lacks_mesh(case, model.lm_head.weight),
        *(fault for module in experts for fault in _lacks_exchange(case, module)),
        *_lacks_sharing(case, trainer),
        *_lacks_chunks(case, trainer),
        *_lacks_recomputation(case, trainer),
    ]


def _lacks_mesh(case: Case, weight: object) -> Iterator[str]:
    shape = tuple(weight.device_mesh.shape) if isinstance(weight, DTensor) else ()
    wanted = (case.ranks // case.shards, case.shards)
    if tuple(size for size in shape if size > 1) != tuple(size for size in wanted if size > 1):
        yield f"lm_head lies on a mesh {shape}, not {wanted}"


def _lacks_exchange(case: Case, module: Experts) -> Iterator[str]:
    ep, efsdp, _ = case.sizes
    weight, dispatcher = module.down_proj, module.dispatcher
    part = weight.to_local().numel() if isinstance(weight, DTensor) else weight.numel()
    # FSDP's shards of dim 0 may be uneven; those of expert parallelism are not.
    if ep > 1 and part * ep * efsdp != weight.numel():
        yield f"a rank holds {part} of {weight.numel()} elements, not one of {ep} x {efsdp} parts"
    if type(dispatcher) is not EXCHANGES[case.exchange]:
        yield f"tokens are exchanged by {type(dispatcher).__name__}"
    if isinstance(dispatcher, BalancedAllToAll) and case.routing == "skewed" and not _copied(dispatcher):
        yield "no hot expert was copied"


def _lacks_sharing(case: Case, trainer: Trainer) -> Iterator[str]:
    context = context_of(trainer.model)
    found = (1, 1) if context is None else (context.degrees.ulysses, context.degrees.ring)
    if found != case.degrees:
        yield f"sequences are shared by ulysses x ring = {found}"


def _lacks_chunks(case: Case, trainer: Trainer) -> Iterator[str]:
    assert isinstance(trainer.observer, Watcher), "a trainer of the grid"
    dims = trainer.observer.head_dims
    if dims != ({3} if case.head == "logits" else {0}):
        yield f"the head returned tensors of {sorted(dims)} dims"


def _copied(dispatcher: BalancedAllToAll) -> bool:
    return any(after < before for before, after in dispatcher.loads)


def _lacks_recomputation(case: Case, trainer: Trainer) -> Iterator[str]:
    for name, layer in trainer.model.model.language_model.layers.named_children():
        found = layer.forward
        kind = ("reentrant" if found.reentrant else "on") if isinstance(found, Recomputed) else "off"
        if kind != case.recompute:
            yield f"recomputation of layer {name} is {kind}"

"""One optimizer step's loss and gradients, summed over micro-batches and ranks.

All divisors stand in the loss, as the tokens' shares in it (see `glmv.ops.loss`). All else is a sum.
"""
# Shapes: B batch, S sequence, V vocab.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from glmv.ops.chunked_loss import ChunkSize, Targets
from glmv.ops.loss import Objective, count_targets, shares, shift, target_cross_entropy
from glmv.parallel.context_parallel import context_of
from glmv.parallel.process import AgreedError

if TYPE_CHECKING:
    from glmv.data.batch import Batch


def global_targets(micro_batches: Sequence[Batch], sharers: int = 1) -> int:
    """Collective: valid targets of the global batch, over this step's micro-batches and all ranks.

    Args:
        sharers: how many ranks have each micro-batch (context parallelism); it counts once.
    """
    count = torch.tensor(sum(int(count_targets(batch.labels)) for batch in micro_batches))
    dist.all_reduce(count)
    return int(count) // sharers


def accumulate_gradients(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    targets: int,
    device: torch.device,
    loss_type: str = "per_token_loss",
    chunk_size: ChunkSize | None = None,
) -> tuple[float, float]:
    """Collective: run forward and backward over this rank's micro-batches, adding to the gradients.

    Args:
        targets: the global count (see `global_targets`). With 0 of them the loss is 0 and so is every gradient.
        loss_type: `features.loss_cfg.loss_type`; every rank must have equally many micro-batches.
        chunk_size: make no more logits at a time than those of so many tokens; None makes all at once.
    Returns:
        The global loss, equal on every rank, and this rank's part of it.
    """
    context = context_of(model)
    sharers = 1 if context is None else context.degrees.size
    objective = Objective(loss_type, targets, micro_batches=len(micro_batches) * dist.get_world_size() // sharers)
    parts: list[Tensor] = []
    for batch in micro_batches:
        # float64 until the loss rounds it, and on the CPU: not every device has float64.
        share_BS = shares(batch.labels, batch.document_ids, objective)
        target_BS = shift(batch.labels)
        if context is not None:
            target_BS, share_BS = context.split_targets(batch.document_ids, target_BS, share_BS)
        loss = _loss(model, batch.to(device), target_BS.to(device), share_BS, chunk_size)
        loss.backward()
        parts.append(loss.detach())
    # Added up in float64 on the CPU: the report does not depend on how the samples were spread beyond the last digits.
    partial = torch.stack(parts).to("cpu", torch.float64).sum()
    total = partial.clone()
    dist.all_reduce(total)
    return float(total), float(partial)


def _loss(model: nn.Module, batch: Batch, target_BS: Tensor, share_BS: Tensor, chunk_size: ChunkSize | None) -> Tensor:
    if chunk_size is None:
        return target_cross_entropy(model(**batch.model_inputs()), target_BS, share_BS)
    targets = Targets(target_BS, share_BS, chunk_size.tokens(rows=len(target_BS)))
    loss: Tensor = model(**batch.model_inputs(), targets=targets)
    return loss


def stop_if_not_finite(
    step: int, loss: float, partial: float, grad_norm: float, model: nn.Module, micro_batches: Sequence[Batch]
) -> None:
    """Stop every rank in this same step, before the weights change, if its loss or gradient norm is not finite.

    `loss` and `grad_norm` are equal on every rank, so that all take the same branch.

    Raises:
        AgreedError: with the step, the ranks and samples whose loss is not finite, and the first such gradient.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    _stop(step, loss, partial, grad_norm, model, micro_batches)


def _stop(
    step: int, loss: float, partial: float, grad_norm: float, model: nn.Module, micro_batches: Sequence[Batch]
) -> NoReturn:
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not _local(p.grad).isfinite().all()]
    samples = [] if math.isfinite(partial) else [i for batch in micro_batches for i in batch.sample_ids]
    reports: list[tuple[list[str], list[str]]] = [([], [])] * dist.get_world_size()
    dist.all_gather_object(reports, (bad, samples))
    order = [name for name, _ in model.named_parameters()]
    everywhere = sorted({name for names, _ in reports for name in names}, key=order.index)
    lines = [f"step {step}: loss {loss}, gradient norm {grad_norm}; the step was not taken."]
    lines += [f"Rank {rank}'s loss is not finite, on {', '.join(ids)}." for rank, (_, ids) in enumerate(reports) if ids]
    if everywhere:
        lines.append(f"{len(everywhere)} gradients are not finite, the first is {everywhere[0]}.")
    lines.append("Look at these samples and at the loaded weights; checkpoints of earlier steps are untouched.")
    raise AgreedError("\n".join(lines), exit_code=1)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

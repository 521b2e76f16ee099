"""What the gradients' error looks like: a rank that is missing or counted twice, a wrong divisor, one module."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
# Share of the error's energy that an explanation must account for.
ACCOUNTED = 0.9


def explain(candidate: Tensors, truth: Tensors, by_rank: Mapping[int, Tensors]) -> str:
    """A sentence for the reader of a miss, or "" if nothing simple accounts for the error.

    Args:
        by_rank: the law's gradient of each rank's micro-batches; they add up to `truth`.
    """
    names = list(truth)
    error = torch.cat([(candidate[n].double() - truth[n].double()).flatten() for n in names])
    if not torch.isfinite(error).all():
        return "some gradients are not finite"
    ranks = sorted(by_rank)
    columns = torch.stack([torch.cat([by_rank[r][n].double().flatten() for n in names]) for r in ranks], 1)
    factor = torch.linalg.lstsq(columns, error[:, None]).solution.flatten()
    rest = error - columns @ factor
    if rest.square().sum() > (1 - ACCOUNTED) * error.square().sum():
        return ""
    if (factor - factor.mean()).abs().max() < 0.02 * (1 + factor.mean().abs()):
        return f"every gradient is {1 + float(factor.mean()):.3f} times what it must be: a divisor is wrong"
    parts = [
        f"rank {rank}'s gradient counts {round(1 + float(f), 2) + 0:.2f} times"
        for rank, f in zip(ranks, factor, strict=True)
        if abs(f) > 0.02
    ]
    return ", ".join(parts)


def holding_rank(name: str, where: str, shapes: Mapping[str, torch.Size], world_size: int) -> int | None:
    """The rank whose shard holds an element, where FSDP2 splits every tensor along dim 0 as `torch.chunk` does.

    Args:
        name: published name; the experts of a layer are one stacked tensor, split by expert.
        where: index of the element such as "[3, 17]"; None is returned for anything else.
    """
    index = re.match(r"\[(\d+)", where)
    if index is None or name not in shapes:
        return None
    row, rows = int(index[1]), shapes[name][0]
    if expert := re.search(r"(.*\.experts\.)(\d+)\.(\w+)\.weight$", name):
        row = int(expert[2])
        rows = sum(1 for other in shapes if other.startswith(expert[1]) and other.endswith(f".{expert[3]}.weight"))
    return row // -(-rows // world_size)

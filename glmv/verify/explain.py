"""What the gradients' error looks like: a rank that is missing or counted twice, a wrong divisor, one module."""

from __future__ import annotations

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

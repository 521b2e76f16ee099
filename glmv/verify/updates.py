"""Judge clipping and AdamW given the candidate's own gradients: every element to a few ulps.

AdamW is discontinuous where a gradient is about zero, so its result cannot be judged through the gradients' budget.
With the candidate's gradients in hand it is plain arithmetic, whose rounding error is bounded element by element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from glmv.verify.judge import Finding, place_of_largest
from spec.optimizer import Hyper, State, adamw, clip, grad_norm

# Roundings that stand one behind the other in an update (clip, moments, bias correction, root, quotient, decay).
ULPS = 8
# A norm is a sum of rounded squares of every tensor: blocked sums inside, one sum over tensors outside.
NORM_ULPS = 16


def judge_update(
    before: Mapping[str, Tensor],
    state: State,
    gradients: Mapping[str, Tensor],
    reported_norm: float,
    after: Mapping[str, Tensor],
    state_after: State,
    hyper: Hyper,
) -> Iterator[Finding]:
    """Findings for the reported gradient norm, and for each trained tensor its weight and both moments.

    Tensors without a gradient (buffers, frozen weights) must not have changed by a bit.
    """
    wide = {name: g.double() for name, g in gradients.items()}
    norm = grad_norm(wide)
    eps = torch.finfo(next(iter(gradients.values())).dtype).eps
    yield Finding("gradient norm", "relative", abs(reported_norm - float(norm)) / float(norm), NORM_ULPS * eps)
    clipped = clip(wide, torch.tensor(reported_norm, dtype=torch.float64), hyper.clip_grad)
    past = State(state.step, *({n: t.double() for n, t in m.items()} for m in (state.exp_avg, state.exp_avg_sq)))
    weights = {name: before[name].double() for name in gradients}
    new, memory = adamw(weights, clipped, past, hyper)
    for name, g in clipped.items():
        first = hyper.beta1 * past.exp_avg[name].abs() + (1 - hyper.beta1) * g.abs()
        root = (memory.exp_avg_sq[name] / (1 - hyper.beta2**memory.step)).sqrt() + hyper.eps
        update = hyper.lr / (1 - hyper.beta1**memory.step) * first / root
        yield _elementwise(name, "weight", after[name], new[name], weights[name].abs() + update)
        yield _elementwise(name, "exp_avg", state_after.exp_avg[name], memory.exp_avg[name], first)
        yield _elementwise(
            name, "exp_avg_sq", state_after.exp_avg_sq[name], memory.exp_avg_sq[name], memory.exp_avg_sq[name]
        )
    for name in before.keys() - gradients.keys():
        changed = float((after[name].double() - before[name].double()).abs().max())
        yield Finding(name, "unchanged", changed, 0.0)


def _elementwise(name: str, figure: str, candidate: Tensor, truth: Tensor, magnitude: Tensor) -> Finding:
    """Largest error in units of the magnitudes that were added up to give each element."""
    tiny = torch.finfo(torch.float32).tiny
    error = ((candidate.double() - truth).abs() / (magnitude + tiny)).nan_to_num(nan=torch.inf)
    allowed = ULPS * torch.finfo(candidate.dtype).eps
    return Finding(name, figure, float(error.max()), allowed, place_of_largest(error))

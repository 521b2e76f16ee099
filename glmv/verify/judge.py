"""Compare a candidate's tensors with the law's, in three figures, each within its budget.

- rel-L2: ||error|| / ||truth||.
- max-norm: max|error| / max|truth|; sees a single wrong element that drowns in the L2 norm.
- projection: <error, truth> / <truth, truth>; sees a wrong scale, which rel-L2 hides under bf16 noise.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from glmv.verify.budgets import FIGURES, classify, floor
from spec.numerics import Policy

Tensors = Mapping[str, Tensor]
DRAWS = 8
# Below this share of its class a float64 truth is a zero that rounding missed, such as the gradient of a bias that
# softmax cancels.
CANCELLED = 1e-9
ALL = "all tensors"


@dataclass(frozen=True)
class Finding:
    """One tensor's worst figure against its budget; `used` above 1 is a miss."""

    name: str
    figure: str
    error: float
    allowed: float
    where: str = ""

    @property
    def used(self) -> float:
        """error / allowed."""
        if self.error == 0:
            return 0.0
        return self.error / self.allowed if self.allowed > 0 and math.isfinite(self.error) else math.inf

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        figures = f"error {self.error:.2e}, allowed {self.allowed:.2e}, {self.figure}"
        return f"{self.name}: used {self.used:.3g} of 1 ({figures}){place}"


def _lists() -> defaultdict[tuple[str, str], list[float]]:
    return defaultdict(list)


@dataclass
class Noise:
    """Squared errors of noise draws, pooled by tensor and by class."""

    _squares: defaultdict[tuple[str, str], list[float]] = field(default_factory=_lists)

    def add(self, truth: Tensors, draw: Tensors) -> None:
        """Take in one draw."""
        scales = reference_scales(truth)
        for name, t in truth.items():
            if not t.any():
                continue
            for figure, error in zip(FIGURES, figures(draw[name], t, scales[name]), strict=True):
                self._squares[name, figure].append(error**2)
                self._squares[f"class {classify(name).name}", figure].append(error**2)
        self._squares[ALL, "projection"].append(overall_projection(draw, truth) ** 2)

    def merge(self, other: Noise) -> None:
        """Take in all draws of another pool."""
        for key, squares in other._squares.items():
            self._squares[key] += squares

    def level(self, name: str, figure: str) -> float:
        """RMS over the draws, of this tensor or of its whole class, whichever is larger."""
        keys = (name,) if name == ALL else (name, f"class {classify(name).name}")
        pools = (self._squares.get((key, figure), [0.0]) for key in keys)
        return max(math.sqrt(sum(pool) / len(pool)) for pool in pools)


def reference_scales(truth: Tensors) -> dict[str, tuple[float, float]]:
    """What errors of each tensor are measured against: its own norm and maximum.

    A truth that is zero but for rounding takes the RMS of its class instead (of all tensors if the class has no other).
    """
    energy: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for name, t in truth.items():
        energy[classify(name).name].append((float(t.double().square().sum()), t.numel()))

    def rms(parts: Iterable[tuple[float, int]]) -> float:
        squares, sizes = zip(*parts, strict=True)
        return math.sqrt(sum(squares) / sum(sizes))

    overall = rms(part for parts in energy.values() for part in parts)
    scales = {}
    for name, t in truth.items():
        typical = rms(energy[classify(name).name])
        typical = overall if typical <= CANCELLED * overall else typical
        norm, peak = float(t.double().norm()), float(t.abs().max()) if t.numel() else 0.0
        cancelled = norm <= CANCELLED * typical * math.sqrt(t.numel())
        scales[name] = (typical * math.sqrt(t.numel()), typical) if cancelled else (norm, peak)
    return scales


def figures(candidate: Tensor, truth: Tensor, scale: tuple[float, float]) -> tuple[float, float, float]:
    """The three figures of one tensor. `scale` is (norm, maximum) from `reference_scales`."""
    norm, peak = scale
    error = candidate.double() - truth.double()
    return (
        float(error.norm()) / norm,
        float(error.abs().max()) / peak,
        abs(float((error * truth.double()).sum())) / norm**2,
    )


def compare(candidate: Tensors, truth: Tensors, noise: Noise, dtype: torch.dtype) -> list[Finding]:
    """One finding a tensor (its worst figure), worst first, and one for all tensors together.

    Where the truth is exactly zero (an expert without tokens) the candidate must be too.

    Raises:
        KeyError: the two do not name the same tensors.
        ValueError: shapes differ, or every truth is zero, which would prove nothing.
    """
    if candidate.keys() != truth.keys():
        raise KeyError(f"only one side has {sorted(candidate.keys() ^ truth.keys())}")
    for name, t in truth.items():
        if candidate[name].shape != t.shape:
            raise ValueError(f"{name}: shape {tuple(candidate[name].shape)}, the law has {tuple(t.shape)}")
    if not any(t.any() for t in truth.values()):
        raise ValueError("every truth is exactly zero: this comparison could not fail")
    scales = reference_scales(truth)
    found = [_judge_tensor(n, candidate[n], t, scales[n], noise, dtype) for n, t in truth.items() if t.numel()]
    found.append(_judge_all(candidate, truth, noise, dtype))
    return sorted(found, key=lambda finding: finding.used, reverse=True)


def _judge_tensor(
    name: str, candidate: Tensor, truth: Tensor, scale: tuple[float, float], noise: Noise, dtype: torch.dtype
) -> Finding:
    where = _place(candidate, truth)
    if not truth.any():
        return Finding(name, "exact zero", float(candidate.double().abs().max()), 0.0, where)
    findings = []
    for figure, error in zip(FIGURES, figures(candidate, truth, scale), strict=True):
        least = floor(figure, dtype, truth.shape[-1] if truth.ndim else 1, truth.numel())
        allowed = classify(name).ratio(figure) * max(noise.level(name, figure), least)
        findings.append(Finding(name, figure, error, allowed, where))
    return max(findings, key=lambda finding: finding.used)


def overall_projection(candidate: Tensors, truth: Tensors) -> float:
    """The signed projection of all tensors taken as one vector: a wrong divisor moves every tensor the same way."""
    shift = sum(float(((candidate[n].double() - t.double()) * t.double()).sum()) for n, t in truth.items())
    return shift / sum(float(t.double().square().sum()) for t in truth.values())


def mean_projection(candidates: Sequence[float], draws: Sequence[float], dtype: torch.dtype) -> Finding:
    """Judge the mean over steps of `overall_projection`: noise averages out, and a divisor that is 1 % off does not.

    Args:
        candidates: one value a step.   draws: of as many noise draws; their own mean is the bias that rounding has.
    """
    bias, spread = abs(fmean(draws)), math.sqrt(fmean(d * d for d in draws) / len(candidates))
    allowed = classify(ALL).projection * max(bias, spread, torch.finfo(torch.promote_types(dtype, torch.float32)).eps)
    return Finding(f"{ALL}, mean over {len(candidates)} steps", "projection", abs(fmean(candidates)), allowed)


def _judge_all(candidate: Tensors, truth: Tensors, noise: Noise, dtype: torch.dtype) -> Finding:
    least = floor("projection", dtype, 1, sum(t.numel() for t in truth.values()))
    allowed = classify(ALL).projection * max(noise.level(ALL, "projection"), least)
    return Finding(ALL, "projection", abs(overall_projection(candidate, truth)), allowed)


def _place(candidate: Tensor, truth: Tensor) -> str:
    """The index of the largest error, for the reader of a miss."""
    return place_of_largest((candidate.double() - truth.double()).abs().nan_to_num(nan=math.inf)) if truth.ndim else ""


def place_of_largest(tensor: Tensor) -> str:
    """The index of the largest element, as reports print it."""
    # numpy's is a hundred times as fast as torch's, and every finding asks.
    return f"[{', '.join(map(str, np.unravel_index(int(tensor.argmax()), tensor.shape)))}]"


def judge(candidate: Tensors, law: Callable[[Policy], Tensors], dtype: torch.dtype) -> list[Finding]:
    """Judge by a law that can be run under any policy: truth in float64, noise from draws under `dtype`."""
    truth = law(Policy(torch.float64))
    noise = Noise()
    for draw in range(DRAWS):
        noise.add(truth, law(Policy(dtype, draw=draw)))
    return compare(candidate, truth, noise, dtype)

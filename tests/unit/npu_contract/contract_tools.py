"""Cases in float64, flattened answers, and budgets that follow from dtypes."""

from typing import Any

import torch
from torch import Tensor

from spec.npu_ops import OPERATORS
from spec.npu_ops.cases import draw
from spec.npu_ops.cases.draws import Case

# Every case is small: sums have at most some tens of terms, chained through at most four products.
ULPS = 128


def drawn(name: str, seed: int) -> Case:
    return draw(name, torch.Generator().manual_seed(seed))


def truth(case: Case) -> Case:
    """The case in float64."""
    return Case(tuple(map(widen, case.args)), {name: widen(x) for name, x in case.kwargs.items()}, case.label)


def widen(value: Any) -> Any:
    if isinstance(value, list):
        return [widen(item) for item in value]
    if isinstance(value, torch.dtype):
        return torch.float64
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def tensors(outputs: Any) -> list[Tensor]:
    """Every tensor of an operator's answer."""
    items = outputs if isinstance(outputs, list | tuple) else [outputs]
    return [item for item in items if isinstance(item, Tensor)]


def call(name: str, case: Case) -> Any:
    return OPERATORS[name].forward(*case.args, **case.kwargs)


def largest(*tensors: Tensor | None) -> float:
    """The largest magnitude."""
    return max((float(x.abs().max()) for x in tensors if x is not None and x.numel()), default=0.0)


def equal_in_float64(candidate: Tensor, expected: Tensor, scale: float = 0.0) -> bool:
    """Equal but for the order of summation; `scale` is the size of the terms where they may cancel."""
    assert candidate.dtype == expected.dtype == torch.float64
    assert candidate.shape == expected.shape
    allowed = ULPS * torch.finfo(torch.float64).eps * max(scale, largest(expected))
    return bool(((candidate - expected).abs() <= allowed).all())


def rounded_once(candidate: Tensor, expected: Tensor) -> bool:
    """Within half an ulp of its dtype, and the noise of float32 arithmetic, of the float64 value."""
    noise = ULPS * torch.finfo(torch.float32).eps * largest(expected)
    half_ulp = torch.finfo(candidate.dtype).eps / 2 * expected.abs()
    return bool(((candidate.double() - expected).abs() <= half_ulp + noise).all())

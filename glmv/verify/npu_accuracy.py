"""Ascend's accuracy classes: how far an NPU's kernel may be from the truth, measured by a run of the same dtype.

The vendor's "double benchmark" lets a kernel's error against the truth be a small multiple of the error that a run of
the same dtype on another device has. Here the other run is the contract on the CPU, and the truth is the contract in
float64. Products of matrices are judged in units of the last place instead, and indices and copies exactly.

Source: StandardConfig and its per-operator tables in Ascend's msprobe (mindstudio-probe 26.2.0). The floors are ours:
without them a benchmark that happened to round nothing would allow nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

EXACT, ULP = "exact", "ulp"


@dataclass(frozen=True)
class Ratios:
    """The kernel's figure may be this multiple of the benchmark's."""

    max_relative: float
    mean_relative: float
    rms: float
    small_values: float = 2.0
    balance: float = 2.0


LEVELS = {"L0": Ratios(10, 2, 2), "L1": Ratios(5, 1.5, 1.5), "L2": Ratios(2, 1.2, 1.2)}

STANDARD: dict[str, str] = {
    "npu_moe_token_permute": EXACT,
    "npu_moe_token_permute.backward": "L0",
    "npu_moe_token_unpermute": "L0",
    "npu_moe_token_unpermute.backward": "L0",
    "npu_grouped_matmul": ULP,
    "npu_swiglu": "L0",
    "npu_swiglu.backward": "L0",
    "npu_rotary_mul": "L0",
    "npu_rotary_mul.backward": "L0",
    "npu_rms_norm": "L2",
    "npu_rms_norm.backward": "L2",
    "npu_fusion_attention": "L1",
    "npu_fusion_attention.backward": "L1",
}
"""The standard of every operator that the machine calls, and of its gradient."""

# A value below the first is small: no relative error is taken of it, it only counts whether it is further off than the
# second.
SMALL = {
    torch.float16: (2**-10, 2**-16),
    torch.bfloat16: (2**-10, 2**-16),
    torch.float32: (2**-20, 2**-30),
}
# Of a product in 16 bits: share of elements more than one unit off. In fp32: the mean, or the share beyond 32.
ULP_SHARE_16, ULP_MEAN_32, ULP_FAR_32, ULP_SHARE_32 = 0.001, 64.0, 32.0, 0.05


@dataclass(frozen=True)
class Figures:
    """One result against the truth."""

    max_relative: float
    mean_relative: float
    rms: float
    small_values: float
    balance: float


def judge(standard: str, result: Tensor, benchmark: Tensor, truth: Tensor) -> list[str]:
    """What stands against one tensor of a kernel; empty if nothing does.

    Args:
        standard: a value of `STANDARD`.
        result: what the device gave.   benchmark: the same by the contract, on the CPU, in the same dtype.
        truth: the same in float64.
    Raises:
        ValueError: nothing is compared, or the truth is zero throughout: this comparison could not fail.
    """
    if not truth.numel() or (truth.is_floating_point() and not truth.any()):
        raise ValueError("every truth is exactly zero: this comparison could not fail")
    if result.shape != truth.shape or result.dtype != benchmark.dtype:
        return [f"{result.dtype} {tuple(result.shape)}, expected {benchmark.dtype} {tuple(truth.shape)}"]
    result = result.cpu()
    if result.is_floating_point() and not result.isfinite().all():
        return ["not finite"]
    if standard == EXACT:
        return [] if result.equal(benchmark) else ["differs from the contract, and must not"]
    if standard == ULP:
        return _judge_ulps(result, benchmark, truth)
    return _judge_ratios(LEVELS[standard], result, benchmark, truth)


def judge_all(
    standard: str, result: Mapping[str, Tensor], benchmark: Mapping[str, Tensor], truth: Mapping[str, Tensor]
) -> list[str]:
    """`judge` of every tensor, by name; a truth of exact zeros asks for exact zeros.

    Raises:
        KeyError: the three do not name the same tensors.
    """
    if not result.keys() == benchmark.keys() == truth.keys():
        raise KeyError(f"{sorted(result)}, {sorted(benchmark)} and {sorted(truth)} are not the same tensors")
    found = []
    for name, exact in truth.items():
        if not exact.any() and exact.numel():
            found += [f"{name}: must be exactly zero"] if result[name].cpu().ne(0).any() else []
        else:
            found += [f"{name}: {said}" for said in judge(standard, result[name], benchmark[name], exact)]
    return found


def figures(result: Tensor, truth: Tensor) -> Figures:
    """The five figures of the double benchmark."""
    small_below, small_error = SMALL[result.dtype]
    error, truth = result.double() - truth, truth.double()
    is_small = truth.abs() < small_below
    relative = (error / truth)[~is_small].abs()
    return Figures(
        max_relative=float(relative.max()) if relative.numel() else 0.0,
        mean_relative=float(relative.mean()) if relative.numel() else 0.0,
        rms=float(error.square().mean().sqrt()),
        small_values=float((error[is_small].abs() > small_error).sum()),
        balance=abs(float(error.sign().mean())),
    )


def _floors(benchmark: Tensor, truth: Tensor) -> Figures:
    """What one rounding costs, and how far signs of errors lean by chance."""
    rounding = torch.finfo(benchmark.dtype).eps / 2
    rms = rounding * float(truth.double().square().mean().sqrt())
    return Figures(rounding, rounding / 2, rms / 2, 1.0, 2 / math.sqrt(truth.numel()))


def _judge_ratios(ratios: Ratios, result: Tensor, benchmark: Tensor, truth: Tensor) -> list[str]:
    mine, others, floors = figures(result, truth), figures(benchmark, truth), _floors(benchmark, truth)
    found = []
    for name, ratio in vars(ratios).items():
        error, allowed = getattr(mine, name), ratio * max(getattr(others, name), getattr(floors, name))
        if error > allowed:
            found.append(f"{name.replace('_', ' ')} {error:.2e}, allowed {allowed:.2e}")
    return found


def ulps(result: Tensor, truth: Tensor) -> Tensor:
    """Errors in units of the last place of the truth, in the dtype of the result."""
    info = torch.finfo(result.dtype)
    exponent = truth.double().abs().clamp(min=info.tiny).log2().floor()
    return (result.double() - truth.double()).abs() / (exponent.exp2() * info.eps)


def _judge_ulps(result: Tensor, benchmark: Tensor, truth: Tensor) -> list[str]:
    mine, others = ulps(result, truth), ulps(benchmark, truth)
    if result.dtype != torch.float32:
        share, allowed = _share(mine, 1.0), max(ULP_SHARE_16, _share(others, 1.0))
        return [f"{share:.2%} are more than 1 ulp off, allowed {allowed:.2%}"] if share > allowed else []
    mean, share = float(mine.mean()), _share(mine, ULP_FAR_32)
    if mean < ULP_MEAN_32 or share < ULP_SHARE_32:
        return []
    return [f"{mean:.1f} ulp off in the mean, allowed {ULP_MEAN_32:.0f}; {share:.2%} are more than 32 off"]


def _share(distance: Tensor, beyond: float) -> float:
    return float((distance > beyond).double().mean())

"""The contract's outputs against the wheel's own meta kernels: shape and dtype of every one.

Only in a process that has loaded the wheel (`glmv.verify.wheel.load`).
"""

from __future__ import annotations

import torch

from glmv.verify.wheel.metadata import described, on_device
from spec.npu_ops import OPERATORS
from spec.npu_ops.alltoall import communicators
from spec.npu_ops.cases import Case, draw

# Operators of the contract that the pinned wheel has no meta kernel for; `has_meta_kernel` is what says so.
WITHOUT_META_KERNEL = {
    "npu_moe_gating_top_k_backward": "the wheel registers it for the device alone",
}


def has_meta_kernel(name: str) -> bool:
    """Whether the wheel can infer the operator's outputs."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "Meta")


def differences(name: str, case: Case) -> str | None:
    """None if contract and meta kernel agree on a call; else both answers and the arguments.

    Raises:
        Whatever either of them raises: a drawn case is one that both must take.
    """
    communicators["group"] = lambda rows, sent, received: rows.new_ones(sum(received), rows.shape[1])
    ours = described(OPERATORS[name](*case.args, **case.kwargs))
    kwargs = {key: on_device(value, "meta") for key, value in case.kwargs.items()}
    theirs = described(getattr(torch.ops.npu, name)(*on_device(case.args, "meta"), **kwargs))
    if ours == theirs:
        return None
    given = f"{described(case.args)} { ({key: described(value) for key, value in case.kwargs.items()}) }"
    return f"{name} ({case.label}) with {given}\n  contract: {ours}\n  wheel:    {theirs}"


def drawn(name: str, count: int, seed: int = 0) -> list[Case]:
    """That many cases of an operator, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [draw(name, generator) for _ in range(count)]

"""Devices, and what ranks on them talk through."""

from __future__ import annotations

import os
from collections.abc import Iterator

from glmv import npu_package
from glmv.doctor.fact import Fact, State

PART = "hardware"


def cpu() -> Iterator[Fact]:
    """Cores that this process may use, and the threads torch takes."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Fact(PART, "cpu", f"{cores} cores", note=f"{torch.get_num_threads()} threads a process")


def cuda() -> Iterator[Fact]:
    """GPUs."""
    import torch

    count = torch.cuda.device_count()
    if count:
        yield Fact(PART, "cuda", f"{count} x {torch.cuda.get_device_name(0)}")
    else:
        built = "torch sees no GPU" if torch.version.cuda else "this torch is built without CUDA"
        yield Fact(PART, "cuda", "none", State.absent, built)


def npu() -> Iterator[Fact]:
    """NPUs, real ones."""
    found = npu_package.probe()
    if found.count:
        yield Fact(PART, "npu", f"{found.count} x {found.name}")
    else:
        yield Fact(PART, "npu", "none", State.absent, found.reason or "torch_npu sees no device")


def backends() -> Iterator[Fact]:
    """Collectives: gloo between CPUs, nccl between GPUs, hccl between NPUs."""
    import torch.distributed as dist

    gloo = dist.is_available() and dist.is_gloo_available()
    note = "" if gloo else "this torch is built without gloo: no test on several ranks, and no `glmv verify`"
    yield Fact(PART, "gloo", "there" if gloo else "none", State.good if gloo else State.broken, note)
    nccl = dist.is_available() and dist.is_nccl_available()
    yield Fact(PART, "nccl", "there" if nccl else "none", State.good if nccl else State.absent)
    hccl = npu_package.probe().reason is None
    note = "" if hccl else "comes with a torch_npu that can be imported"
    yield Fact(PART, "hccl", "there" if hccl else "none", State.good if hccl else State.absent, note)

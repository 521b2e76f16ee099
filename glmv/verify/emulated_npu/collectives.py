"""The `hccl` backend of torch.distributed: gloo over the memory of npu tensors (csrc/collectives.h)."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from glmv.verify.emulated_npu.state import extension


def register() -> None:
    """Make `hccl` the backend of npu tensors, alone or in "cpu:gloo,npu:hccl"."""
    dist.Backend.register_backend("hccl", make_group, devices=["npu"])


def make_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    """The backend of one process group."""
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    backend: dist.Backend = extension().hccl(gloo)
    return backend

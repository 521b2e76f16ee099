"""The `hccl` backend of torch.distributed: gloo over the memory of npu tensors (csrc/collectives.h)."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glmv.verify.emulated_npu.state import extension
from spec.npu_ops.alltoall import communicators


def register() -> None:
    """Make `hccl` the backend of npu tensors, alone or in "cpu:gloo,npu:hccl"."""
    dist.Backend.register_backend("hccl", make_group, devices=["npu"])
    extension().ProcessGroupHCCL.get_hccl_comm_name = get_hccl_comm_name


def make_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    """The backend of one process group."""
    backend: dist.Backend = extension().ProcessGroupHCCL(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))
    return backend


def get_hccl_comm_name(backend: Any, rank: int, init_comm: bool = True) -> str:  # noqa: ANN401
    """The name by which fused operators find the group: torch_npu's method of its process group.

    Only groups that are asked for their name are kept for such operators.
    """
    name = f"emulated_hccl_{backend.number}"
    communicators.setdefault(name, partial(exchange, backend.gloo))
    return name


def exchange(gloo: Any, rows_AK: Tensor, sent: list[int], received: list[int]) -> Tensor:  # noqa: ANN401
    """Rows [A, K] go out by rank, rows [R, K] come in by rank; on host tensors, for operators that exchange."""
    rows_RK = torch.empty((sum(received), *rows_AK.shape[1:]), dtype=rows_AK.dtype)
    gloo.alltoall_base(rows_RK, rows_AK.contiguous(), received, sent).wait()
    return rows_RK

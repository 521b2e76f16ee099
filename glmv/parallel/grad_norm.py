"""One gradient norm for the whole model, whatever its parameters are sharded over.

Each parameter counts once: a DTensor's local shards are summed over the mesh axes that shard it and over no axis that
replicates it; a plain tensor is a replica on every rank and is summed over none.
`torch.nn.utils.clip_grad_norm_` cannot do this: it stacks per-parameter norms, which fails as soon as two meshes meet.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate


@dataclass
class ShardGroup:
    """Gradients that the same mesh axes shard; `locals` holds this rank's part of each."""

    mesh: DeviceMesh | None
    axes: tuple[int, ...]
    locals: list[Tensor] = field(default_factory=list)

    def total(self, norm_type: float, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Sum of |g|^p over the group's whole parameters, or their largest |g| for the inf norm.

        The same on every rank of the mesh.
        """
        norms = [torch.linalg.vector_norm(g, norm_type, dtype=dtype) for g in self.locals if g.numel() > 0]
        if not norms:
            total = torch.zeros((), dtype=dtype, device=device)
        elif math.isinf(norm_type):
            # A MAX between ranks may drop a NaN; an infinity it keeps.
            total = torch.stack(norms).amax().nan_to_num(nan=math.inf, posinf=math.inf)
        else:
            total = torch.stack(norms).pow(norm_type).sum()
        reduce = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
        if self.mesh is not None:
            for axis in self.axes:
                dist.all_reduce(total, op=reduce, group=self.mesh.get_group(axis))
        return total


def total_norm(parameters: Iterable[nn.Parameter], norm_type: float = 2.0) -> Tensor:
    """Norm of all gradients together, as if they were one long vector.

    Args:
        parameters: any mix of DTensors (of any meshes) and plain tensors; those without a gradient are left out. Every
            rank must pass the same parameters in the same order. The list may be empty.
        norm_type: 2, or another p > 0, or `math.inf`.
    Returns:
        A 0-d tensor, at least fp32, bit-equal on every rank. Non-finite where a gradient is.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    groups, dtype = _group(gradients), torch.float32
    for gradient in gradients:
        dtype = torch.promote_types(dtype, gradient.dtype)
    stacked = torch.stack([group.total(norm_type, dtype, gradients[0].device) for group in groups])
    norm = stacked.amax() if math.isinf(norm_type) else stacked.sum().pow(1.0 / norm_type)
    if dist.is_initialized() and any(not _spans_the_world(group) for group in groups):
        # Replicas were summed apart from each other, perhaps in another order; clipping must agree to the last bit.
        dist.broadcast(norm, src=0)
    return norm


def clip_grad_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0, *, foreach: bool = True
) -> Tensor:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)) and return the norm they had before.

    Args:
        parameters: as for `total_norm`.   max_norm: 0 only measures.
        foreach: scale with multi-tensor kernels; the result is the same.
    Returns:
        The norm before clipping, a 0-d tensor. A caller that finds it non-finite must not step; the gradients are then
        as they were, so that the bad ones can be found.
    """
    parameters = list(parameters)
    norm = total_norm(parameters, norm_type)
    if max_norm > 0 and norm.isfinite():
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for group in _group([parameter.grad for parameter in parameters if parameter.grad is not None]):
            if foreach:
                torch._foreach_mul_(group.locals, coefficient)
                continue
            for local in group.locals:
                local.mul_(coefficient)
    return norm


def _group(gradients: list[Tensor]) -> list[ShardGroup]:
    """Gradients by the mesh axes that shard them, in order of first appearance (the same on every rank)."""
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], ShardGroup] = {}
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            mesh, local = gradient.device_mesh, gradient.to_local()
            axes = tuple(axis for axis, placement in enumerate(gradient.placements) if _is_sharded(placement))
        else:
            mesh, axes, local = None, (), gradient
        groups.setdefault((mesh, axes), ShardGroup(mesh, axes)).locals.append(local)
    return list(groups.values())


def _is_sharded(placement: Placement) -> bool:
    if placement.is_partial():
        raise ValueError("a gradient is still a partial sum (placement Partial); reduce it before its norm is taken")
    return not isinstance(placement, Replicate)


def _spans_the_world(group: ShardGroup) -> bool:
    if group.mesh is None:
        return dist.get_world_size() == 1
    return math.prod(group.mesh.size(axis) for axis in group.axes) == dist.get_world_size()

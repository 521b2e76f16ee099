"""The ways in which the same ranks are laid out: for everything but experts, for experts, and for sequences.

    data     dp_replicate x dp_shard     8 ranks, fully_shard_parallel_size 4:
                                         [0 1 2 3]     one copy of all weights
                                         [4 5 6 7]     another

    experts  edp x efsdp x ep            expert_parallel_size 2, expert_fully_shard_parallel_size 2:
                                         [[0 1]        0 and 1 hold half of the experts each and exchange tokens, so do
                                          [2 3]]       2 and 3; 0 and 2 share one half's weights, 1 and 3 the other's
                                         [[4 5]        another copy of all experts
                                          [6 7]]

    sequence  dp x ring x ulysses        ring_attention_size 2, ulysses_parallel_size 2:
                                         [[0 1]        0 to 3 share every sequence; 0 and 1 exchange heads for tokens,
                                          [2 3]]       0 and 2 pass keys and values round
                                         [[4 5]        other sequences
                                          [6 7]]

Ranks that share no sequence have samples of their own. Ranks of `ep` exchange tokens; those of `efsdp` and `edp` reduce
the gradients of the experts that they share, as those of dp_shard and dp_replicate do for all other weights: by sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from glmv.config.parallel import ParallelConfig
from glmv.config.sizes import misfit
from glmv.errors import GlmvError
from glmv.parallel.process import Process

DATA_AXES = ("dp_replicate", "dp_shard")
EXPERT_AXES = ("edp", "efsdp", "ep")
SEQUENCE_AXES = ("dp", "ring", "ulysses")
CONTEXT_AXES = ("dp", "context")


class ParallelError(GlmvError):
    """A parallel size that does not fit the number of ranks, or the model."""


@dataclass(frozen=True)
class Sizes:
    """How many ranks each axis has; both products are the number of ranks, and a multiple of ring x ulysses."""

    dp_replicate: int
    dp_shard: int
    edp: int
    efsdp: int
    ep: int
    ring: int = 1
    ulysses: int = 1

    @property
    def sharers(self) -> int:
        """Ranks that share each sequence."""
        return self.ring * self.ulysses

    @classmethod
    def of(cls, config: ParallelConfig, world_size: int) -> Sizes:
        """What a config asks of `world_size` ranks.

        Raises:
            ParallelError: no layout has these sizes, with the numbers.
        """
        if fault := misfit(config, world_size):
            raise ParallelError(f"parallel.{fault}.")
        shard = world_size if config.fully_shard_parallel_size == "auto" else config.fully_shard_parallel_size
        ep = config.expert_parallel_size
        efsdp = config.expert_fully_shard_parallel_size or world_size // ep
        shared = config.ring_attention_size, config.ulysses_parallel_size
        return cls(world_size // shard, shard, world_size // (ep * efsdp), efsdp, ep, *shared)


@dataclass(frozen=True)
class Meshes:
    """The layouts of all ranks.

    Attributes:
        data: axes dp_replicate and dp_shard.   experts: axes edp, efsdp and ep; ep neighbours have consecutive ranks.
        sequence: axes dp, ring and ulysses.   context: axes dp and context, which is ring and ulysses in one; None
            where every rank has sequences of its own.
    """

    data: DeviceMesh
    experts: DeviceMesh
    sequence: DeviceMesh | None = None
    context: DeviceMesh | None = None

    @property
    def fsdp(self) -> DeviceMesh:
        """What units of everything but experts are sharded over; with replicas it has two axes (HSDP)."""
        return self.data if self.data["dp_replicate"].size() > 1 else self.data["dp_shard"]

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """What the experts of one ep rank are sharded over; with replicas it has two axes."""
        return self.experts["edp", "efsdp"] if self.experts["edp"].size() > 1 else self.experts["efsdp"]

    @property
    def ep(self) -> DeviceMesh:
        """Ranks that share one copy of the experts and exchange tokens."""
        return self.experts["ep"]


def build_meshes(config: ParallelConfig, process: Process) -> Meshes:
    """Collective: lay out all ranks.

    Raises:
        ParallelError: the sizes do not multiply to the number of ranks; the same on every rank.
    """
    sizes = Sizes.of(config, process.world_size)
    groups = process.world_size // sizes.sharers
    sequence = context = None
    if sizes.sharers > 1:
        sequence = _mesh(process, SEQUENCE_AXES, (groups, sizes.ring, sizes.ulysses))
        context = _mesh(process, CONTEXT_AXES, (groups, sizes.sharers))
    return Meshes(
        sequence=sequence,
        context=context,
        data=_mesh(process, DATA_AXES, (sizes.dp_replicate, sizes.dp_shard)),
        experts=_mesh(process, EXPERT_AXES, (sizes.edp, sizes.efsdp, sizes.ep)),
    )


def _mesh(process: Process, axes: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    """Collective the first time: one mesh over all ranks, made once in the life of a process group."""
    if (axes, sizes) not in process.meshes:
        process.meshes[axes, sizes] = init_device_mesh(process.device.type, sizes, mesh_dim_names=axes)
    return process.meshes[axes, sizes]

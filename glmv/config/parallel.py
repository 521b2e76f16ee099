"""`parallel`: how parameters, experts and sequences are spread over the ranks."""

from typing import Literal

from pydantic import Field, model_validator

from glmv.config.section import Count, DTypeName, ModulePlan, Section, Step
from glmv.config.sizes import misfit


class FsdpPlan(ModulePlan):
    """`parallel.fsdp_plan`: which modules become FSDP2 units, and in which number formats they run."""

    ignored_modules: list[str] = Field(default_factory=list)
    """Module patterns whose parameters stay whole on every rank."""
    hook_modules: list[str] | None = None
    """Modules whose hooks gather the parameters of units below them."""
    param_dtype: DTypeName | None = None
    """Compute format of parameters; null keeps the stored format."""
    reduce_dtype: DTypeName | None = None
    """Format in which gradients are summed over ranks; null means `param_dtype`."""
    output_dtype: DTypeName | None = None
    """Format that the model's logits are cast to; null leaves them. A loss is never rounded."""
    cast_forward_inputs: bool = True
    """Cast floating inputs of a unit to `param_dtype`."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass and gather them again for the backward pass."""
    num_to_forward_prefetch: Step = 0
    """How many of the following units are gathered ahead in the forward pass."""
    num_to_backward_prefetch: Step = 0
    """How many of the following units are gathered ahead in the backward pass."""
    pregather: bool = False
    """Gather every unit before a step begins."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""


class EpPlan(ModulePlan):
    """`parallel.ep_plan`: which modules hold experts (none named: all of them), and how tokens travel to them."""

    apply_efsdp_modules: list[str] = Field(default_factory=list)
    """Expert modules that are sharded inside an expert-parallel rank: those of `apply_modules`, or empty, the same."""
    dispatcher: Literal["alltoall", "allgather", "mc2"] = "alltoall"
    """How tokens are exchanged between expert-parallel ranks."""
    use_npu_fused_ops: bool = True
    """On an NPU use its own kernels for permutation, grouped matmul, SwiGLU, RMSNorm and rotary embedding."""


class ParallelConfig(Section):
    """`parallel`: sizes of the meshes. Whether they multiply to the number of ranks is checked when training starts."""

    fully_shard_parallel_size: Count | Literal["auto"] = "auto"
    """Ranks that share one copy of the parameters; `auto` means all ranks."""
    fsdp_plan: FsdpPlan = FsdpPlan()
    """FSDP2 units."""
    data_parallel_size: Count | None = None
    """Ranks that see different samples; null computes it from the other sizes."""
    tensor_parallel_size: Count = 1
    """Ranks that split single matrices."""
    ring_attention_size: Count = 1
    """Ranks of ring context parallelism."""
    ulysses_parallel_size: Count = 1
    """Ranks of Ulysses context parallelism."""
    expert_parallel_size: Count = 1
    """Ranks that share one copy of the routed experts."""
    expert_fully_shard_parallel_size: Count | None = None
    """Ranks that shard one expert-parallel rank's experts; null means all ranks divided by `expert_parallel_size`.
    Ranks beyond both sizes hold copies."""
    ep_plan: EpPlan = EpPlan()
    """Expert parallelism."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> "ParallelConfig":
        if fault := misfit(self):
            raise ValueError(fault)
        return self

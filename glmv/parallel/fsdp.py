"""FSDP2 units by the YAML's patterns, with sums instead of means.

model                              the root: what no unit below holds
|- model.visual                    pixel values arrive here and are cast to the compute dtype
|  `- model.visual.blocks.{*}      inputs keep their dtype: rotary cos and sin are fp32
`- model.language_model
   `- ...layers.{*}
      `- ...mlp.gate               a unit of its own, in the master dtype: the router scores in fp32
"""

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from glmv.config.dtypes import torch_dtype
from glmv.config.parallel import FsdpPlan, ParallelConfig
from glmv.config.sizes import misfit
from glmv.errors import GlmvError
from glmv.parallel.patterns import match_any, select_modules

# FSDP keeps one dtype per unit, and the router's differs from that of the layer around it.
ROUTERS = ("*.mlp.gate",)
# FSDP would round the fp32 rotary tables of these blocks to bf16 on the way in; they cast hidden states themselves.
OWN_INPUT_DTYPE = ("model.visual.blocks.{*}",)


class ParallelError(GlmvError):
    """A parallel size that does not fit the number of ranks."""


def check_sizes(config: ParallelConfig, world_size: int) -> None:
    """Raise ParallelError where the sizes do not multiply to `world_size`, or ask for a layout that is not built."""
    if fault := misfit(config, world_size):
        raise ParallelError(f"parallel.{fault}.")
    for key in ("fully_shard_parallel_size", "data_parallel_size"):
        asked = getattr(config, key)
        if asked not in ("auto", None, world_size):
            raise ParallelError(
                f"parallel.{key} = {asked}, but {world_size} ranks were started; copies of shards are not built yet.\n"
                f"Start {asked} ranks, or leave the size out: parameters are sharded over all ranks."
            )


def apply_fsdp(model: nn.Module, config: ParallelConfig, mesh: DeviceMesh) -> list[str]:
    """Shard `model` in place and return the names of its units, parents first.

    Gradients are summed over the mesh and divided by nothing; the loss carries the only divisor. A parameter that
    nothing used gets a zero gradient, so that all ranks reduce the same tensors.

    Args:
        model: on any device, meta included; its parameters' dtype is the master dtype.
        mesh: one axis over all ranks, of the device type that the model will live on.
    Raises:
        PatternError: a pattern of `fsdp_plan.apply_modules` matches no module.
    """
    plan = config.fsdp_plan
    units = select_modules(model, plan.apply_modules, key="parallel.fsdp_plan.apply_modules")
    units |= {name: module for name, module in model.named_modules() if match_any(name, ROUTERS)}
    # Children first: a unit takes the parameters that no unit below it has taken.
    for name, module in reversed([*model.named_modules()]):
        if name in units or module is model:
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=_precision(name, plan),
                reshard_after_forward=plan.reshard_after_forward if name else None,
            )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Neither setting reaches the units below.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True, recurse=False)
    names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    _set_prefetch(model, names, plan)
    return names


def _precision(name: str, plan: FsdpPlan) -> MixedPrecisionPolicy:
    param_dtype, reduce_dtype = torch_dtype(plan.param_dtype), torch_dtype(plan.reduce_dtype)
    if match_any(name, ROUTERS):
        return MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        output_dtype=torch_dtype(plan.output_dtype),
        cast_forward_inputs=plan.cast_forward_inputs and not match_any(name, OWN_INPUT_DTYPE),
    )


def _set_prefetch(model: nn.Module, names: Sequence[str], plan: FsdpPlan) -> None:
    """Let every numbered unit gather its next siblings ahead, with the units inside them (a layer and its router)."""
    for chain in _chains(names):
        bundles = [[model.get_submodule(n) for n in names if n == name or n.startswith(f"{name}.")] for name in chain]
        for i, (unit, *_) in enumerate(bundles):
            assert isinstance(unit, FSDPModule)
            if following := bundles[i + 1 : i + 1 + plan.num_to_forward_prefetch]:
                unit.set_modules_to_forward_prefetch(_flatten(following))
            if preceding := bundles[:i][::-1][: plan.num_to_backward_prefetch]:
                unit.set_modules_to_backward_prefetch(_flatten(preceding))


def _chains(names: Sequence[str]) -> list[list[str]]:
    """Units that are items of one list (`...layers.0`, `...layers.1`), which run one after another."""
    chains: dict[str, list[str]] = {}
    for name in names:
        parent, _, last = name.rpartition(".")
        if last.isdigit():
            chains.setdefault(parent, []).append(name)
    return list(chains.values())


def _flatten(bundles: Sequence[Sequence[nn.Module]]) -> list[FSDPModule]:
    return [module for bundle in bundles for module in bundle if isinstance(module, FSDPModule)]

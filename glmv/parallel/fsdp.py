"""FSDP2 units by the YAML's patterns, with sums instead of means, on one mesh or two.

model                              the root: what no unit below holds
|- model.visual                    pixel values arrive here and are cast to the compute dtype
|  `- model.visual.blocks.{*}      inputs keep their dtype: rotary cos and sin are fp32
`- model.language_model
   `- ...layers.{*}
      |- ...mlp.gate               a unit of its own, in the master dtype: the router scores in fp32
      `- ...mlp.experts            under expert parallelism: a unit of its own, on the experts' mesh
"""

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from glmv.config.dtypes import torch_dtype
from glmv.config.parallel import FsdpPlan, ParallelConfig
from glmv.parallel.expert_parallel import EXPERTS, shard_dim
from glmv.parallel.mesh import Meshes
from glmv.parallel.patterns import match_any, select_modules

# FSDP keeps one dtype per unit, and the router's differs from that of the layer around it.
ROUTERS = ("*.mlp.gate",)
# FSDP would round what these take in fp32, rotary tables and routing weights; they cast hidden states themselves.
OWN_INPUT_DTYPE = ("model.visual.blocks.{*}", EXPERTS)


def apply_fsdp(
    model: nn.Module,
    config: ParallelConfig,
    meshes: Meshes,
    experts: Collection[str] = (),
    *,
    returns_loss: bool = False,
) -> list[str]:
    """Shard `model` in place and return the names of its units, parents first.

    Gradients are summed over all ranks and divided by nothing; the loss carries the only divisor. A parameter that
    nothing used gets a zero gradient, so that all ranks reduce the same tensors.

    Args:
        model: on any device, meta included; its parameters' dtype is the master dtype.
        meshes: of the device type that the model will live on.
        experts: modules that go over the experts' mesh (see `apply_expert_parallel`).
        returns_loss: the model returns a loss, which `fsdp_plan.output_dtype` must not round.
    Raises:
        PatternError: a pattern of `fsdp_plan.apply_modules` matches no module.
    """
    plan = config.fsdp_plan
    units = {*select_modules(model, plan.apply_modules, key="parallel.fsdp_plan.apply_modules"), *experts, ""}
    units |= {name for name, _ in model.named_modules() if match_any(name, ROUTERS)}
    # Children first: a unit takes the parameters that no unit below it has taken.
    for name, module in reversed([*model.named_modules()]):
        if name in units:
            fully_shard(
                module,
                mp_policy=_precision(name, plan, returns_loss),
                reshard_after_forward=plan.reshard_after_forward if name else None,
                **(_over_experts(meshes) if name in experts else {"mesh": meshes.fsdp}),
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


def _over_experts(meshes: Meshes) -> dict[str, Any]:
    """`fully_shard`'s arguments for experts: dim 0 belongs to expert parallelism where there is any."""
    if meshes.ep.size() == 1:
        return {"mesh": meshes.expert_fsdp}
    ranks = meshes.experts["efsdp"].size()
    return {"mesh": meshes.expert_fsdp, "shard_placement_fn": lambda weight: Shard(shard_dim(weight.shape, ranks))}


def _precision(name: str, plan: FsdpPlan, returns_loss: bool) -> MixedPrecisionPolicy:
    param_dtype, reduce_dtype = torch_dtype(plan.param_dtype), torch_dtype(plan.reduce_dtype)
    if match_any(name, ROUTERS):
        return MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        # Of the model alone: units inside it hand on what the module behind them, which may be no unit, computes in.
        output_dtype=None if name or returns_loss else torch_dtype(plan.output_dtype),
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

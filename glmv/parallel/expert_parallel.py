"""Experts spread over ranks: each holds E / P of them, whole or sharded, and tokens travel to it.

    expert_parallel_size P = 2, four experts                      rank 0: experts 0, 1      rank 1: experts 2, 3

Applied from outside the model: the stacked weights become DTensors with dim 0 over `ep`, and the module gets a
dispatcher. FSDP then shards another dim over `efsdp` and copies over `edp`.
"""

from collections.abc import Collection, Sequence

from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from glmv.config.features import FeaturesConfig
from glmv.config.parallel import ParallelConfig
from glmv.model.moe import Experts
from glmv.parallel import mc2
from glmv.parallel.balance import BalancedAllToAll
from glmv.parallel.dispatch import DISPATCHERS, Dispatcher
from glmv.parallel.mesh import Meshes, ParallelError
from glmv.parallel.patterns import select_modules

EXPERTS = "*.mlp.experts"
KEY = "parallel.ep_plan.apply_modules"
SHARDED_KEY = "parallel.ep_plan.apply_efsdp_modules"


def apply_expert_parallel(
    model: nn.Module, config: ParallelConfig, features: FeaturesConfig, meshes: Meshes
) -> list[str]:
    """Spread the experts of `model` over the ep axis, in place.

    Args:
        model: on any device, meta included, not sharded yet.
        features: says whether hot experts are copied.
    Returns:
        Names of the modules that FSDP must shard over the experts' mesh; none where experts are laid out as all else.
    Raises:
        PatternError: a pattern matches no module.
        ParallelError: a module without experts is named, sizes don't divide the experts or their weights, or copies
            are asked for where no exchange can make them.
    """
    _check_balance(config, features)
    if config.expert_parallel_size == 1 and config.expert_fully_shard_parallel_size is None:
        return []
    chosen = _expert_modules(model, config)
    for name, experts in chosen.items():
        _check_sizes(name, experts, meshes)
        if meshes.ep.size() > 1:
            _check_fused(len(experts.gate_up_proj), config, meshes)
            _spread(experts, meshes)
            experts.dispatcher = _dispatcher(config, features, meshes)
    return list(chosen)


def shard_dim(shape: Sequence[int], ranks: int) -> int:
    """Which dim of an expert weight FSDP splits: 0 is expert parallelism's, and FSDP splits others evenly only.

    Raises:
        ParallelError: no dim can be split evenly.
    """
    for dim in range(1, len(shape)):
        if shape[dim] % ranks == 0:
            return dim
    raise ParallelError(
        f"parallel.expert_fully_shard_parallel_size = {ranks} divides none of the sizes "
        f"{' and '.join(map(str, shape[1:]))} of an expert's weight.\n"
        "Give another expert_fully_shard_parallel_size; the ranks that are left over hold copies."
    )


def _expert_modules(model: nn.Module, config: ParallelConfig) -> dict[str, Experts]:
    """What the plan names; without a plan all experts."""
    plan = config.ep_plan
    named = select_modules(model, plan.apply_modules or [EXPERTS], key=KEY)
    experts = {name: module for name, module in named.items() if isinstance(module, Experts)}
    if others := named.keys() - experts.keys():
        raise ParallelError(f"{KEY} names {min(others)}, which holds no stacked experts.\nName modules like {EXPERTS}.")
    if plan.apply_efsdp_modules:
        _check_same(experts, select_modules(model, plan.apply_efsdp_modules, key=SHARDED_KEY))
    return experts


def _check_same(experts: Collection[str], sharded: Collection[str]) -> None:
    if differing := {*experts} ^ {*sharded}:
        raise ParallelError(
            f"{SHARDED_KEY}: {min(differing)} is not in both apply_modules and apply_efsdp_modules.\n"
            "Leave apply_efsdp_modules out: all experts that are spread over ranks are sharded as well."
        )


def _check_sizes(name: str, experts: Experts, meshes: Meshes) -> None:
    held, ranks = experts.gate_up_proj.shape[0], meshes.ep.size()
    if held % ranks:
        divisors = [str(n) for n in range(1, held + 1) if held % n == 0]
        raise ParallelError(
            f"parallel.expert_parallel_size = {ranks} does not divide the {held} experts of {name}.\n"
            f"Choose {', '.join(divisors[:-1])} or {divisors[-1]}."
        )
    for weight in experts.parameters():
        if ranks > 1:
            shard_dim(weight.shape, meshes.experts["efsdp"].size())


def _check_balance(config: ParallelConfig, features: FeaturesConfig) -> None:
    if not features.enable_ep_balance:
        return
    if config.expert_parallel_size == 1:
        raise ParallelError(
            "features.enable_ep_balance = true, but parallel.expert_parallel_size = 1: no other rank can run a copy.\n"
            "Give an expert_parallel_size, or turn it off."
        )
    if config.ep_plan.dispatcher != "alltoall":
        raise ParallelError(
            f"features.enable_ep_balance = true, but parallel.ep_plan.dispatcher = {config.ep_plan.dispatcher}: only "
            "alltoall can send rows to copies.\nUse it, or turn enable_ep_balance off."
        )


def _check_fused(experts: int, config: ParallelConfig, meshes: Meshes) -> None:
    if config.ep_plan.dispatcher != "mc2":
        return
    if why := mc2.why_not(meshes.ep, config.fsdp_plan.param_dtype, experts):
        raise ParallelError(f"parallel.ep_plan.dispatcher = mc2: {why}.\nUse alltoall, which computes the same.")


def _dispatcher(config: ParallelConfig, features: FeaturesConfig, meshes: Meshes) -> Dispatcher:
    if features.enable_ep_balance:
        return BalancedAllToAll(meshes.ep, features.ep_balance_plan.max_dup_experts_num)
    if config.ep_plan.dispatcher == "mc2":
        return mc2.Mc2(meshes.ep)
    return DISPATCHERS[config.ep_plan.dispatcher](meshes.ep)


def _spread(experts: Experts, meshes: Meshes) -> None:
    for name, weight in [*experts.named_parameters()]:
        # Nothing is sent: every rank keeps its part of what it has, and has all or nothing yet (meta).
        part = distribute_tensor(weight.detach(), meshes.ep, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(part, requires_grad=weight.requires_grad))

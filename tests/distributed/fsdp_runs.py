"""Every case of `rank_cases` on the ranks of a test."""

import math
from itertools import chain

import torch
import torch.distributed as dist
from layouts import build as build_layout
from layouts import check_alike
from rank_cases import CASES, LOSS_CASE, LOSS_TYPES, NOTHING_TO_LEARN, cases_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from glmv.parallel.grad_norm import clip_grad_norm, total_norm
from glmv.train.step import accumulate_gradients, global_targets
from glmv.verify.grid.batches import micro_batch


def build(directory, policy, process, frozen=()):
    return build_layout(directory, process, dtype=policy, frozen=frozen, grouped=True)


def run(model, names, process, loss_type="per_token_loss"):
    share = len(names) // process.world_size
    mine = [micro_batch(name) for name in names[process.rank * share :][:share]]
    choices, hooks = watch_routers(model)
    model.zero_grad()
    loss, _ = accumulate_gradients(model, mine, global_targets(mine), process.device, loss_type)
    for hook in hooks:
        hook.remove()
    # Cloned, because on one rank the whole tensor is the shard, and the next backward pass adds to it.
    gradients = {k: p.grad.full_tensor().clone() for k, p in model.named_parameters() if p.grad is not None}
    check_alike({"loss": torch.tensor(loss), **gradients})
    norms = gather(float(clip_grad_norm(model.parameters(), 0.0)))
    return {
        "loss": torch.tensor(loss, dtype=torch.float64),
        "gradients": gradients,
        "norms": norms,
        "choices": [*chain(*gather(choices))],
    }


def watch_routers(model):
    choices, hooks = [], []
    layers = [n for n, m in model.named_modules() if n.endswith("mlp.gate")]
    for name in layers:

        def keep(_, __, output, name=name):
            if name == layers[0]:
                choices.append({})
            choices[-1][int(name.split(".")[3])] = output[0]

        hooks.append(model.get_submodule(name).register_forward_hook(keep))
    return choices, hooks


def gather(thing):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, thing)
    return everyone


def observed_dtypes(model):
    """What arrives where in a forward pass under mixed precision."""
    seen = {}
    block, layer = model.model.visual.blocks[0], model.model.language_model.layers[1]
    block.register_forward_pre_hook(lambda m, args: seen.update(vision_cos=args[2].dtype))
    block.attn.qkv.register_forward_pre_hook(lambda m, args: seen.update(vision_weight=m.weight.dtype))
    layer.mlp.gate.register_forward_pre_hook(lambda m, args: seen.update(router_weight=m.weight.dtype))
    layer.mlp.gate.register_forward_hook(lambda m, args, out: seen.update(routing_weight=out[1].dtype))
    layer.mlp.experts.register_forward_pre_hook(lambda m, args: seen.update(experts_weight=m.down_proj.dtype))
    model(**micro_batch("picture").model_inputs()).sum().backward()
    seen["master"] = layer.mlp.experts.down_proj.dtype
    seen["gradient"] = layer.mlp.experts.down_proj.grad.dtype
    seen["correction_bias"] = layer.mlp.gate.e_score_correction_bias.dtype
    return {name: str(dtype).removeprefix("torch.") for name, dtype in seen.items()}


def norms_over_meshes(process):
    """Norms of gradients that live on different meshes; together they are a vector of ones with a 7 and a 0."""
    grid = (process.world_size // 2, 2) if process.world_size > 1 else (1, 1)
    outer = init_device_mesh("cpu", grid, mesh_dim_names=("efsdp", "ep"))
    flat = init_device_mesh("cpu", (process.world_size,))
    placed = [
        (torch.ones(7, 5), flat, [Shard(0)]),  # uneven
        (torch.ones(3, 4), flat, [Shard(0)]),  # nothing on the last of four ranks
        (torch.ones(8, 6), outer, [Shard(1), Shard(0)]),
        (torch.ones(5, 3), outer, [Replicate(), Shard(0)]),
        (torch.ones(4, 2), outer["ep"], [Shard(0)]),
    ]
    parameters = [nn.Parameter(distribute_tensor(torch.zeros_like(g), mesh, where)) for g, mesh, where in placed]
    for parameter, (gradient, mesh, where) in zip(parameters, placed, strict=True):
        parameter.grad = distribute_tensor(gradient, mesh, where)
    parameters.append(nn.Parameter(torch.zeros(2)))
    parameters[-1].grad = torch.tensor([7.0, 0.0])
    squares = sum(int(p.numel()) for p in parameters) - 2 + 49
    seen = {"squares": squares}
    seen |= {p: gather(float(total_norm(parameters, p))) for p in (2.0, math.inf)}
    clip_grad_norm(parameters, 1.0)
    seen["clipped"] = gather(float(total_norm(parameters)))
    if process.rank == process.world_size - 1:
        parameters[0].grad.to_local().view(-1)[:1] = math.nan
        parameters[2].grad.to_local().view(-1)[:1] = math.nan
    seen["nan"] = gather([float(total_norm(parameters, p)) for p in (2.0, math.inf)])
    return seen


def formats_and_corners(directory, model, process):
    """What two ranks are asked beyond the core."""
    results = {("fp64", "nothing_to_learn"): run(model, NOTHING_TO_LEARN, process)}
    for loss_type in LOSS_TYPES:
        results["fp64", loss_type] = run(model, CASES[LOSS_CASE], process, loss_type)
        results["fp64", f"nothing_to_learn-{loss_type}"] = run(model, NOTHING_TO_LEARN, process, loss_type)
    frozen = build(directory, "fp64", process, frozen=["model.visual"])
    results["fp64", "frozen_vision"] = run(frozen, CASES["text_beside_pictures"], process)
    for policy in ("fp32", "bf16"):
        rounded = build(directory, policy, process)
        results[policy, "all_different"] = run(rounded, CASES["all_different"], process)
    results["dtypes"] = observed_dtypes(rounded)
    return results


def results_of(directory, process):
    """What came out of every case that a world of this size runs; the same on every rank. Collective."""
    model = build(directory, "fp64", process)
    results = {("fp64", case): run(model, CASES[case], process) for case in cases_of(process.world_size)}
    if process.world_size == 2:
        results |= formats_and_corners(directory, model, process)
    results["meshes"] = norms_over_meshes(process)
    return results

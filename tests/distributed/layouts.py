"""The tiny model under any layout, and what one backward pass over some micro-batches gives it."""

import functools
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from glmv.config.features import FeaturesConfig
from glmv.config.parallel import ParallelConfig
from glmv.model import Glm4vMoeForConditionalGeneration, ModelConfig
from glmv.ops.kernels import Kernels
from glmv.parallel.context_parallel import context_of
from glmv.parallel.grad_norm import clip_grad_norm
from glmv.parallel.mesh import build_meshes
from glmv.train.build import parallelize
from glmv.train.optimizer import freeze
from glmv.train.step import accumulate_gradients, global_targets
from glmv.verify.grid.batches import micro_batch
from glmv.verify.grid.law import Law
from spec.layout import per_expert, stacked

PATTERNS = [
    "model.visual",
    "model.visual.blocks.{*}",
    "model.language_model",
    "model.language_model.embed_tokens",
    "model.language_model.layers.{*}",
    "lm_head",
]
POLICIES = {
    "fp64": {"param_dtype": None, "reduce_dtype": None},
    "fp32": {"param_dtype": "fp32", "reduce_dtype": "fp32"},
    "bf16": {"param_dtype": "bf16", "reduce_dtype": "fp32"},
}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
# What the bias of the choice makes of the routing. A token has three experts; of four ranks the first holds 0, 1 and 2,
# the last 9, 10 and 11.
ROUTINGS = {
    "even": {},
    "all_to_first_rank": {0: 4.0, 1: 4.0, 2: 4.0},
    "all_to_last_rank": {9: 4.0, 10: 4.0, 11: 4.0},
    "one_hot_expert": {5: 4.0},
}
BALANCE = {"enable_ep_balance": True, "ep_balance_plan": {"max_dup_experts_num": 2}}


@functools.cache
def law_of(directory: Path, routing: str = "even") -> Law:
    """The law of the tiny model under one of ROUTINGS."""
    law = Law.read(directory)
    weights = dict(law.weights)
    for name in [name for name in weights if name.endswith("e_score_correction_bias")]:
        weights[name] = weights[name].clone()
        for expert, bias in ROUTINGS[routing].items():
            weights[name][expert] += bias
    return Law(weights, law.config)


def parallel_config(dtype: str = "fp64", dispatcher: str = "alltoall", **sizes) -> ParallelConfig:
    """A config with these sizes: `ep`, `efsdp`, `shard`, `ring`, `ulysses`."""
    keys = {
        "ep": "expert_parallel_size",
        "efsdp": "expert_fully_shard_parallel_size",
        "shard": "fully_shard_parallel_size",
        "ring": "ring_attention_size",
        "ulysses": "ulysses_parallel_size",
    }
    plan = {"apply_modules": PATTERNS, "num_to_forward_prefetch": 1, "num_to_backward_prefetch": 1, **POLICIES[dtype]}
    named = {keys[name]: size for name, size in sizes.items()}
    return ParallelConfig(fsdp_plan=plan, ep_plan={"dispatcher": dispatcher}, **named)


def build(
    directory,
    process,
    *,
    dtype="fp64",
    routing="even",
    frozen=(),
    features=None,
    grouped=False,
    kernel="sdpa",
    **layout,
):
    """Collective: the tiny model with its weights."""
    torch.set_default_dtype(torch.float64 if dtype == "fp64" else torch.float32)
    with torch.device("meta"):
        model = Glm4vMoeForConditionalGeneration(ModelConfig.from_hf_dir(directory), Kernels(grouped, kernel))
    torch.set_default_dtype(torch.float32)
    freeze(model, frozen)
    parallel = parallel_config(dtype, **layout)
    parallelize(model, parallel, FeaturesConfig(**(features or {})), build_meshes(parallel, process))
    model.to_empty(device=process.device)
    model.reset_buffers()
    weights = stacked(dict(law_of(directory, routing).weights))
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    return model


def backward(model, names, process, loss_type="per_token_loss", chunk_size=None):
    """Collective: loss and whole gradients of a step over `names`, which the ranks share out; under published names.

    Ranks that share sequences have the same micro-batches. What is returned has the same bits on every rank, so that
    one may judge it for all.
    """
    context = context_of(model)
    sharers = 1 if context is None else context.degrees.size
    share = len(names) * sharers // process.world_size
    mine = [micro_batch(name) for name in names[process.rank // sharers * share :][:share]]
    model.zero_grad()
    targets = global_targets(mine, sharers)
    loss, _ = accumulate_gradients(model, mine, targets, process.device, loss_type, chunk_size)
    said = {"loss": torch.tensor(loss, dtype=torch.float64), **gradients_of(model)}
    check_alike(said)
    return said


def gradients_of(model):
    """Collective: whole gradients under published names."""
    return per_expert(
        {name: p.grad.full_tensor().clone() for name, p in model.named_parameters() if p.grad is not None}
    )


def norm_of(model, norm_type=2.0):
    """Collective: the norm that clipping sees, on this rank."""
    return float(clip_grad_norm(model.parameters(), 0.0, norm_type))


def watch_choices(model):
    """Experts by layer of every pass that follows."""
    choices = []
    gates = [name for name, _ in model.named_modules() if name.endswith("mlp.gate")]
    for name in gates:

        def keep(_, __, output, name=name):
            if name == gates[0]:
                choices.append({})
            choices[-1][int(name.split(".")[3])] = output[0]

        model.get_submodule(name).register_forward_hook(keep)
    return choices


def of_trained(law, said):
    """A law about no more than the parameters that `said` has gradients for."""
    return lambda policy: {name: truth for name, truth in law(policy).items() if name in said}


def trained_names(model):
    """Published names of what is not frozen."""
    return {*per_expert({name: p for name, p in model.named_parameters() if p.requires_grad})}


def check_alike(tensors):
    """Collective: fails with names and ranks if tensors are not rank 0's to the bit; it cannot see others' copies."""
    content = {name: t.reshape(-1).view(torch.uint8).cpu().numpy() for name, t in tensors.items()}
    first, *others = everyone({name: sha256(part).hexdigest() for name, part in content.items()})
    wrong = {rank: {name for name, _ in first.items() ^ said.items()} for rank, said in enumerate(others, start=1)}
    assert not any(wrong.values()), f"not what rank 0 has, by rank: {wrong}"


def everyone(thing):
    """Collective: what each rank has."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, thing)
    return gathered

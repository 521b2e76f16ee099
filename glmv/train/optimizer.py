"""AdamW over every trainable parameter, each stepped in every step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from glmv.config.training import TrainingConfig
from glmv.errors import GlmvError
from glmv.parallel.patterns import select


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Stop the training of what `model.freeze` names; return the names of the parameters that it covers.

    Args:
        patterns: each covers modules, with everything below them, or single parameters.
    Raises:
        PatternError: a pattern matches neither a module nor a parameter.
        GlmvError: nothing would be left to train.
    """
    parameters = dict(model.named_parameters())
    names = [name for name, _ in model.named_modules() if name] + list(parameters)
    chosen = select(names, patterns, key="model.freeze", kind="module or parameter")
    frozen = [name for name in parameters if any(name == c or name.startswith(f"{c}.") for c in chosen)]
    if len(frozen) == len(parameters):
        raise GlmvError("model.freeze covers every parameter of the model; nothing would be trained. Narrow a pattern.")
    for name in frozen:
        parameters[name].requires_grad_(False)
    return frozen


class ShardedAdamW(torch.optim.AdamW):
    """AdamW that updates what this rank holds; its state is sharded like the parameters.

    The update is element by element, so no rank needs another. Given DTensors, torch would first ask how one operator
    over all parameters is sharded, which takes seconds in the first step.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return has_complex


def build_optimizer(model: nn.Module, config: TrainingConfig) -> ShardedAdamW:
    """AdamW with decoupled weight decay on all trainable parameters (sharded as they are), fp32 state for fp32 masters.

    The learning rate is written into the parameter group before each step.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return ShardedAdamW(trainable, lr=config.lr, **_options(config))


def apply_config(optimizer: torch.optim.Optimizer, config: TrainingConfig) -> None:
    """Let the config decide again, after a checkpoint has restored the hyper-parameters of the run that wrote it."""
    for group in optimizer.param_groups:
        group.update(_options(config))


def _options(config: TrainingConfig) -> dict[str, Any]:
    return {
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
        "fused": config.adam_fused,
    }


def optimizer_step(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Step every parameter with `lr`, one that nothing used with a zero gradient.

    Without it weight decay would depend on routing, and a checkpoint would lack the state of such a parameter.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

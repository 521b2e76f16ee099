"""Optimizer state by parameter name: tensors for DCP (`optimizer.<parameter>.<entry>`), the rest as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from glmv.checkpoint.errors import CheckpointError, some
from glmv.checkpoint.manifest import OptimizerGroup
from glmv.checkpoint.names import clean_name

PREFIX = "optimizer."


def groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[OptimizerGroup]:
    """Describe the parameter groups in JSON."""
    names = _names(model)
    return [
        OptimizerGroup(
            parameters=[names[parameter] for parameter in group["params"]],
            options={key: _to_json(value) for key, value in group.items() if key != "params"},
        )
        for group in optimizer.param_groups
    ]


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of the optimizer's state, by key, sharing memory."""
    names = _names(model)
    return {
        f"{PREFIX}{names[parameter]}.{entry}": value
        for parameter, state in optimizer.state.items()
        for entry, value in state.items()
    }


def check_groups(directory: Path, saved: Sequence[OptimizerGroup], live: Sequence[OptimizerGroup]) -> None:
    """Refuse a checkpoint whose groups hold other parameters.

    Raises:
        CheckpointError: naming the parameters.
    """
    if [group.parameters for group in saved] == [group.parameters for group in live]:
        return
    saved_names = {name for group in saved for name in group.parameters}
    live_names = {name for group in live for name in group.parameters}
    differ = saved_names ^ live_names
    what = f"over other parameters: {some(differ)}" if differ else "with other parameter groups"
    raise CheckpointError(
        f"{directory}: its optimizer state is {what}.\n"
        "Train with the same model.freeze and weight decay groups, or set training.no_load_optim: true."
    )


def allocate(model: nn.Module, optimizer: torch.optim.Optimizer, metadata: Metadata) -> dict[str, torch.Tensor]:
    """Give every parameter the state tensors that the checkpoint has for it, sharded like the parameter.

    Returns:
        The new tensors by key, to be filled. A parameter that never had a gradient has none, and gets none.
    """
    entries = _entries(metadata)
    names, filled = _names(model), {}
    optimizer.state.clear()
    for group in optimizer.param_groups:
        on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            for entry, record in entries.get(names[parameter], {}).items():
                value = _like(parameter, record, on_device)
                optimizer.state[parameter][entry] = value
                filled[f"{PREFIX}{names[parameter]}.{entry}"] = value
    return filled


def restore_options(optimizer: torch.optim.Optimizer, saved: Sequence[OptimizerGroup]) -> None:
    """Set every group's hyper-parameters to the saved ones."""
    for group, record in zip(optimizer.param_groups, saved, strict=True):
        for key, value in record.options.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _names(model: nn.Module) -> dict[torch.Tensor, str]:
    return {parameter: clean_name(name) for name, parameter in model.named_parameters()}


def _entries(metadata: Metadata) -> dict[str, dict[str, TensorStorageMetadata]]:
    entries: dict[str, dict[str, TensorStorageMetadata]] = {}
    for key, record in metadata.state_dict_metadata.items():
        if key.startswith(PREFIX) and isinstance(record, TensorStorageMetadata):
            name, entry = key.removeprefix(PREFIX).rsplit(".", 1)
            entries.setdefault(name, {})[entry] = record
    return entries


def _like(parameter: nn.Parameter, record: TensorStorageMetadata, on_device: bool) -> torch.Tensor:
    if record.size == parameter.size():
        return torch.zeros_like(parameter, dtype=record.properties.dtype, requires_grad=False)
    # The step counter: AdamW keeps it on the CPU unless a fused kernel reads it.
    device = parameter.device if on_device else torch.device("cpu")
    return torch.zeros(record.size, dtype=record.properties.dtype, device=device)


def _to_json(value: JsonValue | tuple[JsonValue, ...] | torch.Tensor) -> JsonValue:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value

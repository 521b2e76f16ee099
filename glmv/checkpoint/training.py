"""Loading weights into a (sharded) model and saving a training checkpoint, on every rank together."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import JsonValue
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from glmv.checkpoint import optimizer as optimizer_state
from glmv.checkpoint.dcp import SafeLoadPlanner, SafeReader, alone_is_fine, first_failure, read_metadata
from glmv.checkpoint.errors import CheckpointError, some
from glmv.checkpoint.manifest import Manifest, read_manifest
from glmv.checkpoint.names import clean_name
from glmv.checkpoint.paths import ASSETS, CARRIED, iteration_name, resolve_checkpoint, write_tracker

__all__ = ["LoadReport", "load_model", "load_optimizer", "resolve_checkpoint", "save_checkpoint"]


@dataclass(frozen=True)
class LoadReport:
    """What `load_model` did: how many tensors, and which changed their dtype on the way (name -> stored, live)."""

    tensors: int
    dtype_changes: dict[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)

    @property
    def lossy(self) -> dict[str, tuple[torch.dtype, torch.dtype]]:
        """Changes that can't keep every value, such as float32 to bfloat16."""
        return {
            name: (stored, live)
            for name, (stored, live) in self.dtype_changes.items()
            if torch.promote_types(stored, live) != live
        }


def load_model(model: nn.Module, directory: str | Path) -> LoadReport:
    """Load weights and persistent buffers, strictly: every tensor finds its partner, in model and checkpoint.

    Collective: every rank calls it. The model is sharded and materialised (no meta tensors); it is filled in place.

    Args:
        directory: one checkpoint (see `resolve_checkpoint`).
    Raises:
        CheckpointError: on every rank, naming the tensors: missing, unexpected, of another shape; unknown layout;
            damaged files.
    """
    directory = Path(directory)
    manifest, metadata = read_manifest(directory), read_metadata(directory)
    live = {manifest.dcp_key(name): tensor for name, tensor in model_tensors(model).items()}
    _check_fit(directory, live, metadata)
    load_tensors(live, directory, metadata)
    changes = {}
    for key, tensor in live.items():
        stored = _stored(metadata, key).properties.dtype
        if stored != tensor.dtype:
            changes[key.removeprefix("model.")] = (stored, tensor.dtype)
    return LoadReport(len(live), changes)


def save_checkpoint(
    root: str | Path,
    iteration: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    state: Mapping[str, JsonValue],
    assets_from: str | Path,
) -> Path:
    """Write `root/iter_%07d` and point the tracker at it. Collective: every rank calls it with the same arguments.

    Everything is written under a temporary name first, and the tracker last: whatever interrupts it, the tracker points
    at a complete checkpoint. An earlier checkpoint of the same iteration is replaced.

    Args:
        optimizer: None to save weights only.
        state: whatever else a resume needs; JSON.
        assets_from: the checkpoint (or its hf_assets) that the model was loaded from: it gives tokenizer, configs, the
            tensors that the model has no place for, and the dtypes of an export.
    Returns:
        The checkpoint's directory.
    Raises:
        CheckpointError: on every rank: no space or rights, or a model that is not the one `assets_from` describes.
    """
    root, source = Path(root), Path(assets_from)
    source = source.parent if source.name == ASSETS else source
    final = root / iteration_name(iteration)
    temporary = root / f".{final.name}.tmp"
    manifest = read_manifest(source)
    tensors = {manifest.dcp_key(name): tensor for name, tensor in model_tensors(model).items()}
    _check_exportable(source, set(tensors), manifest)
    groups = []
    if optimizer is not None:
        groups = optimizer_state.groups(model, optimizer)
        tensors |= optimizer_state.tensors(model, optimizer)
    complete = manifest.model_copy(update={"iteration": iteration, "state": dict(state), "optimizer": groups})

    on_rank_zero(lambda: _start(temporary))
    try:
        with alone_is_fine():
            dcp.save(dict(tensors), checkpoint_id=temporary, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise CheckpointError(f"{temporary}: {first_failure(error)}. Check space and rights.") from None
    on_rank_zero(lambda: _finish(temporary, final, complete, source))
    return final


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, directory: str | Path) -> dict[str, JsonValue]:
    """Load the optimizer's state and options in place, and return the `state` that was saved. Collective.

    Raises:
        CheckpointError: the checkpoint has no optimizer, or one over other parameters.
    """
    directory = Path(directory)
    manifest, metadata = read_manifest(directory), read_metadata(directory)
    if not manifest.optimizer:
        raise CheckpointError(
            f"{directory}: holds no optimizer state. Set training.no_load_optim: true, or load a training checkpoint."
        )
    optimizer_state.check_groups(directory, manifest.optimizer, optimizer_state.groups(model, optimizer))
    load_tensors(optimizer_state.allocate(model, optimizer, metadata), directory, metadata)
    optimizer_state.restore_options(optimizer, manifest.optimizer)
    return dict(manifest.state)


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by checkpoint name (wrappers' prefixes removed), sharing memory."""
    return {clean_name(name): tensor for name, tensor in model.state_dict().items()}


def load_tensors(tensors: Mapping[str, torch.Tensor], directory: Path, metadata: Metadata) -> None:
    """Fill tensors in place from the checkpoint. Collective."""
    try:
        reader = SafeReader(directory, metadata)
        with alone_is_fine():
            dcp.load(dict(tensors), storage_reader=reader, planner=SafeLoadPlanner(), no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise CheckpointError(f"{directory}: {first_failure(error)}. Give another iteration.") from None


def on_rank_zero(action: Callable[[], None]) -> None:
    """Run `action` on rank 0 while the others wait; its failure is raised on all of them."""
    message: list[str | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            action()
        except (OSError, CheckpointError) as error:
            message = [str(error)]
    if dist.is_initialized():
        dist.broadcast_object_list(message, src=0)
    if message[0] is not None:
        raise CheckpointError(message[0])


def _start(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)  # what an interrupted save left
    temporary.mkdir(parents=True)


def _finish(temporary: Path, final: Path, manifest: Manifest, source: Path) -> None:
    shutil.copytree(source / ASSETS, temporary / ASSETS, copy_function=shutil.copyfile)
    if (source / CARRIED).exists():
        shutil.copyfile(source / CARRIED, temporary / CARRIED)
    manifest.write(temporary)
    replaced = final.with_name(f".{final.name}.old")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    write_tracker(final.parent, str(manifest.iteration))
    shutil.rmtree(replaced, ignore_errors=True)


def _check_fit(directory: Path, live: Mapping[str, torch.Tensor], metadata: Metadata) -> None:
    stored = {key for key in metadata.state_dict_metadata if key.startswith("model.")}
    missing, unexpected = live.keys() - stored, stored - live.keys()
    faults = []
    if missing:
        faults.append(f"{len(missing)} tensor(s) of the model are missing from the checkpoint: {_names(missing)}.")
    if unexpected:
        faults.append(f"{len(unexpected)} tensor(s) of the checkpoint are unknown to the model: {_names(unexpected)}.")
    for key in sorted(live.keys() & stored):
        record = metadata.state_dict_metadata[key]
        size = record.size if isinstance(record, TensorStorageMetadata) else "a pickled object"
        if size != live[key].size():
            shape = tuple(size) if isinstance(size, torch.Size) else size
            faults.append(f"{_names([key])}: {shape} in the checkpoint, {tuple(live[key].size())} in the model.")
    if faults:
        raise CheckpointError(
            "\n".join([f"{directory}: does not fit the model.", *faults[:8]])
            + "\nBuild the model from the config.json in its hf_assets, or convert the checkpoint that fits."
        )


def _check_exportable(source: Path, live: set[str], manifest: Manifest) -> None:
    described = {manifest.dcp_key(name) for name in manifest.model_tensors()}
    if described == live:
        return
    raise CheckpointError(
        f"{source}: is of another model: {_names(described ^ live)} is in one of the two only.\n"
        "Give the checkpoint that the model was loaded from."
    )


def _names(keys: Iterable[str]) -> str:
    return some([key.removeprefix("model.") for key in keys])


def _stored(metadata: Metadata, key: str) -> TensorStorageMetadata:
    record = metadata.state_dict_metadata[key]
    assert isinstance(record, TensorStorageMetadata)  # _check_fit refused everything else
    return record

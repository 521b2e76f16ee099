"""From a training checkpoint back to a Hugging Face directory: the source's names, dtypes and shards.

A float32 training checkpoint is exported in the dtype that each tensor had in the directory it came from. Optimizer
state is never read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from glmv.checkpoint.ahead import run_ahead
from glmv.checkpoint.dcp import TensorReader, read_metadata
from glmv.checkpoint.errors import CheckpointError, some, system_errors_told
from glmv.checkpoint.hf import side_files, write_index
from glmv.checkpoint.hub_names import hub_tensors
from glmv.checkpoint.layout import expert_slot, split, stacked_shape
from glmv.checkpoint.manifest import DTYPES, Manifest, TensorRecord, read_manifest
from glmv.checkpoint.paths import ASSETS, CARRIED, copy_files, replacing, resolve_checkpoint
from glmv.checkpoint.report import Counter, Progress, Report, carried_notice, environment_notices
from glmv.checkpoint.safetensors_file import Entry, file_order, read_header, read_tensor, write_file
from glmv.model.config import ModelConfig


def dcp_to_hf(
    dcp_dir: str | Path,
    save_dir: str | Path,
    *,
    hf_dir: str | Path | None = None,
    dcp_prefix: str = "",
    hf_prefix: str = "",
    progress: Progress | None = None,
) -> Report:
    """Export a checkpoint (`release` or a training iteration) as a Hugging Face directory.

    Peak memory is one layer's stacked experts in the export's dtype and one rank's part of them.

    Args:
        dcp_dir: a root (its tracker chooses) or one checkpoint.
        save_dir: must not exist, or be empty.
        hf_dir: takes configs, tokenizer and templates from here instead of from the checkpoint.
        dcp_prefix, hf_prefix: the checkpoint records them; other values than the recorded are refused.
    Raises:
        CheckpointError: no manifest or another layout; tensors missing, unknown, damaged or of another shape.
    """
    began = time.perf_counter()
    target = Path(save_dir)
    _check_empty(target)
    directory = resolve_checkpoint(dcp_dir)
    manifest, metadata = read_manifest(directory), read_metadata(directory)
    _check_prefixes(directory, manifest, dcp_prefix, hf_prefix)
    _check_tensors(directory, manifest, metadata)
    assets = _assets(directory, hf_dir, manifest)

    counter = Counter(sum(record.nbytes for record in manifest.tensors.values()), progress)
    source = _Source(directory, manifest, metadata)
    with system_errors_told(), replacing(target) as temporary:
        for file_name, records in _files(manifest).items():
            shapes = {name: (record.dtype, record.shape) for name, record in records.items()}
            write_file(temporary / file_name, shapes, _counted(source, file_order(shapes), counter))
        write_index(temporary, manifest.tensors, counter.done)
        copy_files(assets, temporary)
    notices = (*environment_notices(), *carried_notice(manifest.carried))
    return Report(target, len(manifest.tensors), counter.done, time.perf_counter() - began, notices)


class _Source:
    """Hub tensors of a checkpoint, one by one, with the stacked tensors in use kept."""

    def __init__(self, directory: Path, manifest: Manifest, metadata: Metadata) -> None:
        self._manifest = manifest
        self._reader = TensorReader(directory, metadata)
        self._stacked: dict[str, torch.Tensor] = {}
        self._carried_file = directory / CARRIED
        self._carried: dict[str, Entry] = read_header(self._carried_file) if manifest.carried else {}

    def reading(self, name: str) -> Callable[[], torch.Tensor]:
        """Return what reads one tensor in the dtype of the export; stacked experts are read at once."""
        if name in self._carried:
            return partial(read_tensor, self._carried_file, name, self._carried[name])
        key, dtype = self._manifest.dcp_key(name), DTYPES[self._manifest.tensors[name].dtype]
        slot = expert_slot(name)
        if slot is None:
            return partial(self._reader.read, key, dtype)
        if key not in self._stacked:
            # In a file's order gate_up and down of one layer alternate; an earlier layer's won't be asked for again.
            layer = key.rpartition(".")[0]
            self._stacked = {kept: value for kept, value in self._stacked.items() if kept.rpartition(".")[0] == layer}
            self._stacked[key] = self._reader.read(key, dtype)
        return partial(split, self._stacked[key], slot)


def _counted(source: _Source, names: list[str], counter: Counter) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = run_ahead(source.reading(name) for name in names)
    for name, tensor in zip(names, tensors, strict=True):
        yield name, tensor
        counter.add(tensor.nbytes)


def _files(manifest: Manifest) -> dict[str, dict[str, TensorRecord]]:
    files: dict[str, dict[str, TensorRecord]] = {}
    for name, record in manifest.tensors.items():
        files.setdefault(record.file, {})[name] = record
    return dict(sorted(files.items()))


def _check_empty(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: exists already. Choose another --save-dir, or remove it first.")


def _check_prefixes(directory: Path, manifest: Manifest, dcp_prefix: str, hf_prefix: str) -> None:
    asked = {"--dcp-prefix": (dcp_prefix, manifest.dcp_prefix), "--hf-prefix": (hf_prefix, manifest.hf_prefix)}
    for option, (value, recorded) in asked.items():
        if value and value != recorded:
            raise CheckpointError(
                f"{option} {value!r}: {directory} was written with {recorded!r}. Leave the option out; it is recorded."
            )


def _check_tensors(directory: Path, manifest: Manifest, metadata: Metadata) -> None:
    """Everything the export needs is there, in the right shape, and nothing of the model is left over."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, record in manifest.model_tensors().items():
        slot = expert_slot(name)
        key = manifest.dcp_key(name)
        experts = max(slot.expert + 1, expected.get(key, (0,))[0]) if slot else 0
        expected[key] = stacked_shape(slot.part, record.shape, experts) if slot else record.shape
    found = {
        key: tuple(record.size) if isinstance(record, TensorStorageMetadata) else None
        for key, record in metadata.state_dict_metadata.items()
        if key.startswith("model.")
    }
    if missing := expected.keys() - found.keys():
        raise CheckpointError(f"{directory}: lacks {some(missing)}, which its glmv.json lists. Give another iteration.")
    if unknown := found.keys() - expected.keys():
        raise CheckpointError(
            f"{directory}: holds {some(unknown)}, which its glmv.json doesn't list, so the export would lose it.\n"
            "Restore the glmv.json that belongs to the checkpoint."
        )
    for key, shape in expected.items():
        if found[key] != shape:
            raise CheckpointError(f"{directory}: {key} has shape {found[key]}, its glmv.json says {shape}.")


def _assets(directory: Path, hf_dir: str | Path | None, manifest: Manifest) -> list[Path]:
    """Files to put beside the weights."""
    if hf_dir is None:
        return side_files(directory / ASSETS)
    expected = {tensor.name: tensor.shape for tensor in hub_tensors(ModelConfig.from_hf_dir(hf_dir))}
    for name, record in manifest.model_tensors().items():
        if expected.get(name) != record.shape:
            raise CheckpointError(
                f"--hf-dir {hf_dir}: its config.json is of another model: {name} is {expected.get(name)} there, "
                f"{record.shape} in {directory}. Leave --hf-dir out, or give the right directory."
            )
    return side_files(Path(hf_dir))

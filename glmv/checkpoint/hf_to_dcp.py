"""From a Hugging Face directory to a training checkpoint, one tensor in memory at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

from glmv.checkpoint.dcp import alone_is_fine, first_failure
from glmv.checkpoint.errors import CheckpointError, some, system_errors_told
from glmv.checkpoint.hf import INDEX, HfDirectory, sha256, side_files
from glmv.checkpoint.hub_names import hub_tensors
from glmv.checkpoint.layout import EXPERT_LAYOUT, expert_slot, stack, stacked_shape
from glmv.checkpoint.manifest import DTYPES, FORMAT, Manifest, Source, TensorRecord
from glmv.checkpoint.paths import ASSETS, CARRIED, RELEASE, TRACKER, copy_files, replacing, write_tracker
from glmv.checkpoint.report import Counter, Progress, Report, carried_notice, environment_notices
from glmv.checkpoint.safetensors_file import file_order, write_file
from glmv.model.config import ModelConfig


def hf_to_dcp(
    hf_dir: str | Path,
    save_dir: str | Path,
    *,
    dcp_prefix: str = "",
    hf_prefix: str = "",
    progress: Progress | None = None,
) -> Report:
    """Convert a Hugging Face directory into `save_dir/release`, and point `save_dir`'s tracker at it.

    Peak memory is about two stacked expert tensors, whatever the number of layers.

    Args:
        dcp_prefix: put before every name in the checkpoint.
        hf_prefix: taken off every name of the directory first.
    Raises:
        CheckpointError: the directory is incomplete or doesn't fit its config.json, or `save_dir` is in use.
    """
    began = time.perf_counter()
    root = Path(save_dir)
    _check_unused(root)
    hub = HfDirectory(hf_dir)
    manifest = _describe(hub, dcp_prefix, hf_prefix)
    counter = Counter(sum(record.nbytes for record in manifest.tensors.values()), progress)
    with system_errors_told(), replacing(root / RELEASE) as temporary:
        _write_model(temporary, hub, manifest, counter)
        _write_carried(temporary, hub, manifest, counter)
        copy_files(side_files(hub.directory), temporary / ASSETS)
        manifest.write(temporary)
    write_tracker(root, RELEASE)
    notices = (*environment_notices(), *carried_notice(manifest.carried))
    return Report(root / RELEASE, len(manifest.tensors), counter.total, time.perf_counter() - began, notices)


def _check_unused(root: Path) -> None:
    for name in (TRACKER, RELEASE):
        if (root / name).exists():
            raise CheckpointError(f"{root}: holds a checkpoint already ({name}). Choose another --save-dir.")
    if root.exists() and not root.is_dir():
        raise CheckpointError(f"{root}: is a file. Choose another --save-dir.")


def _describe(hub: HfDirectory, dcp_prefix: str, hf_prefix: str) -> Manifest:
    """Check the directory against its config.json and record what it holds."""
    records = hub.records
    expected = {tensor.name: tensor.shape for tensor in hub_tensors(ModelConfig.from_hf_dir(hub.directory))}
    _check_complete(hub.directory, expected, records)
    index = hub.directory / INDEX
    return Manifest(
        format=FORMAT,
        expert_layout=EXPERT_LAYOUT,
        iteration=0,
        dcp_prefix=dcp_prefix,
        hf_prefix=hf_prefix,
        source=Source(
            directory=hub.directory.resolve().name,
            config_sha256=sha256(hub.directory / "config.json") or "",
            index_sha256=sha256(index),
        ),
        tensors={name: records[name] for name in [*expected, *sorted(records.keys() - expected.keys())]},
        carried=sorted(records.keys() - expected.keys()),
    )


def _check_complete(
    directory: Path, expected: Mapping[str, tuple[int, ...]], records: Mapping[str, TensorRecord]
) -> None:
    missing = expected.keys() - records.keys()
    if missing:
        hint = ""
        if any(name.endswith("experts.gate_up_proj") for name in records):
            hint = " Its experts are stacked; save it with experts one by one, as the published directory has them."
        raise CheckpointError(
            f"{directory}: {len(missing)} tensor(s) that config.json asks for are missing: {some(missing)}.{hint}\n"
            "Download the directory again, or mend its config.json."
        )
    for name, shape in expected.items():
        if records[name].shape != shape:
            raise CheckpointError(
                f"{directory / records[name].file}: {name} has shape {records[name].shape}, "
                f"config.json asks for {shape}. Mend config.json, or download the directory again."
            )


class _LazyPlanner(DefaultSavePlanner):
    """Plans with meta tensors and reads each tensor when its turn to be written comes."""

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._read = read

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Read the tensor."""
        return self._read(write_item.index.fqn)


def _write_model(directory: Path, hub: HfDirectory, manifest: Manifest, counter: Counter) -> None:
    names: dict[str, list[str]] = {}
    for name in manifest.model_tensors():
        names.setdefault(manifest.dcp_key(name), []).append(name)
    plan = {key: _meta(hub.directory, members, manifest) for key, members in names.items()}

    def read(key: str) -> torch.Tensor:
        tensor = _assemble(hub, names[key], plan[key])
        counter.add(tensor.nbytes)
        return tensor

    # One file per tensor: torch keeps every tensor of a file until the file is closed.
    writer = FileSystemWriter(directory, single_file_per_rank=False, per_thread_copy_ahead=0)
    try:
        with alone_is_fine():
            dcp.save(dict(plan), storage_writer=writer, planner=_LazyPlanner(read), no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"{directory}: {first_failure(error)}.") from None


def _meta(directory: Path, members: list[str], manifest: Manifest) -> torch.Tensor:
    """Shape and dtype of a stored tensor, without memory."""
    records = [manifest.tensors[name] for name in members]
    if len({record.dtype for record in records}) > 1:
        raise CheckpointError(f"{directory}: the experts of {members[0]} have different dtypes; save them in one.")
    slot = expert_slot(members[0])
    shape = records[0].shape
    if slot is not None:
        shape = stacked_shape(slot.part, shape, 1 + max(_expert(name) for name in members))
    return torch.empty(shape, dtype=DTYPES[records[0].dtype], device="meta")


def _expert(name: str) -> int:
    slot = expert_slot(name)
    assert slot is not None
    return slot.expert


def _assemble(hub: HfDirectory, members: list[str], meta: torch.Tensor) -> torch.Tensor:
    slots = [(expert_slot(name), partial(hub.read, name)) for name in members]
    parts = [(slot, read) for slot, read in slots if slot is not None]
    return stack(meta.shape, meta.dtype, parts) if parts else hub.read(members[0])


def _write_carried(directory: Path, hub: HfDirectory, manifest: Manifest, counter: Counter) -> None:
    if not manifest.carried:
        return
    shapes = {name: (manifest.tensors[name].dtype, manifest.tensors[name].shape) for name in manifest.carried}
    names: Iterable[str] = file_order(shapes)
    counter.add(write_file(directory / CARRIED, shapes, ((name, hub.read(name)) for name in names)))

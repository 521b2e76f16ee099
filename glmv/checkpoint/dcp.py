"""Reading PyTorch distributed checkpoints without running what a pickle asks for.

torch's own reader unpickles `.metadata` and every non-tensor entry without restriction. This one builds only the
classes that torch writes there, loads tensors with `weights_only`, and never opens a file outside the checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.utils import _create_file_view

from glmv.checkpoint.errors import CheckpointError

_METADATA_CLASSES = {
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "StorageMeta",
    "MetadataIndex",
    "_MEM_FORMAT_ENCODING",
}


class _MetadataUnpickler(pickle.Unpickler):
    """Builds what torch writes into `.metadata`, and nothing else."""

    def find_class(self, module: str, name: str) -> object:
        if module == dcp_metadata.__name__ and name in _METADATA_CLASSES:
            return getattr(dcp_metadata, name)
        if (module, name) == (dcp_filesystem.__name__, "_StorageInfo"):
            return dcp_filesystem._StorageInfo
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if module.startswith("pathlib") and name == "PosixPath":
            return PurePosixPath
        raise CheckpointError(f"names {module}.{name}, which no torch checkpoint needs")


def read_metadata(directory: Path) -> Metadata:
    """Read `.metadata`.

    Raises:
        CheckpointError: missing, truncated, no DCP metadata, or asking for anything else to be built.
    """
    path = directory / ".metadata"
    try:
        with path.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
    except FileNotFoundError:
        raise CheckpointError(f"{directory}: has no .metadata: it is unfinished. Give another iteration.") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}. It is damaged or not to be trusted; get it from its source.") from None
    except Exception as error:
        # A damaged pickle raises whatever its bytes happen to mean: any exception says the same here.
        reason = error or type(error).__name__
        raise CheckpointError(f"{path}: is damaged ({reason}). Give another iteration.") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{path}: holds no DCP metadata. Give another iteration.")
    for info in metadata.storage_data.values():
        _check_relative(path, info.relative_path)
    return metadata


def _check_relative(path: Path, relative: str) -> None:
    if PurePosixPath(relative).name != relative:
        raise CheckpointError(f"{path}: points to {relative!r}, outside the checkpoint. Get it from its source again.")


class SafeReader(FileSystemReader):
    """torch's reader with the restricted `.metadata`, which is read once."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Return the metadata that was read before."""
        return self._metadata


class SafeLoadPlanner(DefaultLoadPlanner):
    """torch's planner, which would unpickle non-tensor entries, without that."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse: this project keeps everything that is no tensor in JSON."""
        raise CheckpointError(f"{read_item.dest_index.fqn}: is a pickled object, which glmv does not load.")


class TensorReader:
    """Reads whole tensors of one checkpoint, one at a time, in a single process."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        self._directory = directory
        self._metadata = metadata

    def read(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read one tensor, assembled from the shards that ranks wrote.

        Args:
            key: as in the metadata.
            dtype: to convert to while reading; None for the stored one.
        Raises:
            CheckpointError: a file is missing, truncated or damaged, or leaves a part of the tensor out.
        """
        record = self._metadata.state_dict_metadata.get(key)
        if not isinstance(record, TensorStorageMetadata):
            raise CheckpointError(f"{self._directory}: no tensor {key}. Give a checkpoint that glmv wrote.")
        if [chunk.sizes for chunk in record.chunks] == [record.size]:
            whole = self._read_chunk(key, MetadataIndex(key, record.chunks[0].offsets), record.size)
            return whole.to(dtype or whole.dtype)
        tensor = torch.empty(record.size, dtype=dtype or record.properties.dtype)
        filled = 0
        for chunk in record.chunks:
            part = self._read_chunk(key, MetadataIndex(key, chunk.offsets), chunk.sizes)
            window = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            tensor[window].copy_(part)
            filled += part.numel()
        if filled != tensor.numel():
            raise CheckpointError(f"{self._directory}: {key}: {filled} of {tensor.numel()} elements are stored.")
        return tensor

    def _read_chunk(self, key: str, index: MetadataIndex, sizes: torch.Size) -> torch.Tensor:
        info = self._metadata.storage_data.get(index)
        if info is None:
            raise CheckpointError(f"{self._directory}: .metadata doesn't say where {key} at {index.offset} is stored.")
        path = self._directory / info.relative_path
        try:
            with path.open("rb") as stream:
                view = cast(IO[bytes], _create_file_view(stream, info.offset, info.length))
                part = torch.load(view, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: is missing, and {key} stands in it. Give another iteration.") from None
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0] if str(error) else "no data"
            raise CheckpointError(
                f"{path}: {key} is truncated or damaged ({reason}). Give another iteration."
            ) from None
        if not isinstance(part, torch.Tensor) or part.size() != sizes:
            raise CheckpointError(f"{path}: {key} is not the tensor of shape {tuple(sizes)} that .metadata promises.")
        return part


def first_failure(error: CheckpointException) -> str:
    """The failure of the lowest rank that failed, in one line."""
    rank, (failure, _) = min(error.failures.items())
    reason = (str(failure) or type(failure).__name__).splitlines()[0].rstrip(".")
    return f"rank {rank}: {reason}" if dist.is_initialized() else reason


@contextlib.contextmanager
def alone_is_fine() -> Iterator[None]:
    """Silence torch's remark that there is no process group: a single process saves and loads on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield

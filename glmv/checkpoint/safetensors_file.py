"""The safetensors format: a length, a JSON header, the tensors' bytes.

Read and written tensor by tensor with plain file calls, so that neither a mapped shard nor a dictionary of a whole
shard counts against the memory of a conversion. Files are byte-identical to those of the safetensors library.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from glmv.checkpoint.errors import CheckpointError
from glmv.checkpoint.manifest import DTYPES

_MAX_HEADER = 100_000_000  # the library's own limit
_RANK = {name: rank for rank, name in enumerate(DTYPES)}


class Entry(NamedTuple):
    """One tensor of a file: dtype name, shape, and where its bytes are."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, Entry]:
    """Read and check the header of a file.

    Raises:
        CheckpointError: not there, no safetensors file, or shorter than its header says.
    """
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            raw = stream.read(length) if length <= _MAX_HEADER else b""
            size = os.fstat(stream.fileno()).st_size
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}. Download the directory again.") from None
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = {name: _entry(fields, 8 + length) for name, fields in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path}: is no safetensors file, or its header is damaged. Download it again.") from None
    for name, entry in entries.items():
        _check_entry(path, name, entry, size)
    return entries


def _entry(fields: Mapping[str, Any], base: int) -> Entry:
    start, end = fields["data_offsets"]
    return Entry(fields["dtype"], tuple(map(int, fields["shape"])), base + int(start), base + int(end))


def _check_entry(path: Path, name: str, entry: Entry, size: int) -> None:
    if entry.dtype not in DTYPES:
        raise CheckpointError(f"{path}: {name} is stored as {entry.dtype}; choose one of {', '.join(DTYPES)}.")
    if entry.end - entry.start != _bytes(entry.dtype, entry.shape):
        raise CheckpointError(f"{path}: {name}: {entry.end - entry.start} bytes don't fit shape {entry.shape}.")
    if entry.end > size:
        raise CheckpointError(
            f"{path}: is truncated: {name} ends at byte {entry.end}, the file at {size}. Download it again."
        )


def read_tensor(path: Path, name: str, entry: Entry) -> torch.Tensor:
    """Read one tensor into memory of its own."""
    raw = torch.empty(entry.end - entry.start, dtype=torch.uint8)
    with path.open("rb", buffering=0) as stream:
        stream.seek(entry.start)
        into, done = raw.numpy().data, 0
        while done < len(into):
            got = stream.readinto(into[done:])
            if not got:
                raise CheckpointError(f"{path}: ends within {name}. Download it again.")
            done += got
    return raw.view(DTYPES[entry.dtype]).view(entry.shape)


def file_order(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    """Names in the order in which the library lays them out: wide dtypes first, then by name."""
    return sorted(shapes, key=lambda name: (_RANK[shapes[name][0]], name))


def write_file(
    path: Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]], tensors: Iterable[tuple[str, torch.Tensor]]
) -> int:
    """Write a file through a temporary name.

    Args:
        shapes: name -> (dtype name, shape) of everything the file will hold.
        tensors: the tensors themselves, in `file_order`, consumed one by one.
    Returns:
        Bytes of tensors written.
    """
    header, offset = {}, 0
    for name in file_order(shapes):
        dtype, shape = shapes[name]
        end = offset + _bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb", buffering=0) as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for name, tensor in tensors:
            dtype, shape = shapes[name]
            assert (tensor.dtype, tensor.shape) == (DTYPES[dtype], shape), name
            _write_all(stream.fileno(), tensor)
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    return offset


def _write_all(descriptor: int, tensor: torch.Tensor) -> None:
    flat = tensor.contiguous().view(-1)
    rest = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize

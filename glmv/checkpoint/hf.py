"""A Hugging Face directory: which tensor stands where, read one by one; and writing such a directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from glmv.checkpoint.errors import CheckpointError, some
from glmv.checkpoint.manifest import TensorRecord
from glmv.checkpoint.safetensors_file import Entry, read_header, read_tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Weights and pickles of other formats; everything else in a directory is carried to the export.
_NO_SIDE_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".distcp")


class HfDirectory:
    """The weights of a directory: `model.safetensors`, or shards and their index. Only headers are read at first.

    Raises:
        CheckpointError: no weights, a shard missing or truncated, an index that the shards contradict.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._entries: dict[str, tuple[Path, Entry]] = {}
        if (self.directory / INDEX).is_file() and (self.directory / SINGLE).is_file():
            raise CheckpointError(
                f"{self.directory}: has both {INDEX} and {SINGLE}, and they need not agree. Remove one of them."
            )
        if (self.directory / INDEX).is_file():
            self._open_shards(_weight_map(self.directory / INDEX))
        elif (self.directory / SINGLE).is_file():
            path = self.directory / SINGLE
            self._entries = {name: (path, entry) for name, entry in read_header(path).items()}
        else:
            raise CheckpointError(
                f"{self.directory}: has neither {INDEX} nor {SINGLE}. Give the directory of a model in HF format."
            )

    @property
    def records(self) -> dict[str, TensorRecord]:
        """Dtype, shape and file of every tensor."""
        return {
            name: TensorRecord(dtype=entry.dtype, shape=entry.shape, file=path.name)
            for name, (path, entry) in self._entries.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor."""
        path, entry = self._entries[name]
        return read_tensor(path, name, entry)

    def _open_shards(self, weight_map: Mapping[str, str]) -> None:
        listed: dict[str, set[str]] = {}
        for name, file_name in weight_map.items():
            listed.setdefault(file_name, set()).add(name)
        for file_name in sorted(listed):
            self._open_shard(self.directory / file_name, listed[file_name], weight_map)

    def _open_shard(self, path: Path, listed: set[str], weight_map: Mapping[str, str]) -> None:
        if not path.is_file():
            raise CheckpointError(
                f"{path}: is missing, and {INDEX} lists {len(listed)} tensor(s) in it ({some(listed, 1)}). "
                "Download the directory again."
            )
        entries = read_header(path)
        if absent := listed - entries.keys():
            raise CheckpointError(f"{path}: lacks {some(absent)}, which {INDEX} lists in it. Download it again.")
        for name in entries.keys() - listed:
            where = f"lists it in {weight_map[name]}" if name in weight_map else "doesn't list it"
            raise CheckpointError(f"{path}: holds {name}, but {INDEX} {where}. Download the directory again.")
        self._entries |= {name: (path, entry) for name, entry in entries.items()}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        valid = all(Path(name).name == name and name.endswith(".safetensors") for name in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        valid = False
    if not valid or not weight_map:
        raise CheckpointError(f"{index}: is no index of shards in this directory. Download it again.")
    return weight_map


def write_index(directory: Path, tensors: Mapping[str, TensorRecord], total_size: int) -> None:
    """Write model.safetensors.index.json, unless all tensors are in one `model.safetensors`."""
    weight_map = {name: record.file for name, record in tensors.items()}
    if set(weight_map.values()) == {SINGLE}:
        return
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def side_files(directory: Path) -> list[Path]:
    """Configs, tokenizer, processor and template files, model card: all that is no weights and not hidden."""
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_NO_SIDE_FILES)
    ]


def sha256(path: Path) -> str | None:
    """Digest of a small file; None if it isn't there."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None

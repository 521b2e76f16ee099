"""glmv.json: what a checkpoint is, written beside its tensors so that nothing has to be guessed."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, NonNegativeInt, ValidationError

from glmv.checkpoint.errors import CheckpointError
from glmv.checkpoint.layout import EXPERT_LAYOUT, stored_key

FILE_NAME = "glmv.json"
FORMAT = 1
# safetensors' names, in the order in which the library lays tensors out in a file (widest first).
DTYPES = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorRecord(_Strict):
    """One tensor of the Hugging Face directory that this checkpoint came from and will be exported to."""

    dtype: Literal[*DTYPES]  # type: ignore[valid-type]
    shape: tuple[NonNegativeInt, ...]
    # A plain name: an export writes this file.
    file: str = Field(pattern=r"^[^/\\]+\.safetensors$")

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Source(_Strict):
    """The directory that was converted."""

    directory: str
    config_sha256: str
    index_sha256: str | None = None


class OptimizerGroup(_Strict):
    """One parameter group: the parameters' names and every hyper-parameter."""

    parameters: list[str]
    options: dict[str, JsonValue]


class Manifest(_Strict):
    """Content of glmv.json."""

    format: int
    expert_layout: str
    iteration: int
    dcp_prefix: str
    hf_prefix: str
    source: Source
    tensors: dict[str, TensorRecord]
    # Tensors that the model has no place for (a next-token-prediction layer): they travel in a file of their own.
    carried: list[str] = []
    optimizer: list[OptimizerGroup] = []
    state: dict[str, JsonValue] = {}

    def dcp_key(self, name: str) -> str:
        """Key in the DCP files of a hub tensor or of a model parameter."""
        return f"model.{self.dcp_prefix}{stored_key(name).removeprefix(self.hf_prefix)}"

    def model_tensors(self) -> dict[str, TensorRecord]:
        """Everything but the carried tensors."""
        carried = set(self.carried)
        return {name: record for name, record in self.tensors.items() if name not in carried}

    def write(self, directory: Path) -> None:
        """Write glmv.json, whole or not at all."""
        write_atomically(directory / FILE_NAME, self.model_dump_json(indent=1) + "\n")


def read_manifest(directory: Path) -> Manifest:
    """Read a checkpoint's glmv.json.

    Raises:
        CheckpointError: there is none, it is damaged, of another format, or records another expert layout.
    """
    path = directory / FILE_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{directory}: has no {FILE_NAME}, so the layout of its experts is unknown; glmv does not guess it.\n"
            "Convert the Hugging Face directory it came from with `glmv convert hf-to-dcp`."
        )
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise CheckpointError(
            f"{path}: {where or 'the file'}: {fault['msg']}.\n"
            "Restore the file, or convert the Hugging Face directory again with `glmv convert hf-to-dcp`."
        ) from None
    _check_kind(path, manifest)
    return manifest


def _check_kind(path: Path, manifest: Manifest) -> None:
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"{path}: format = {manifest.format}, this glmv reads {FORMAT}.\n"
            "Use the glmv that wrote it to export it with `glmv convert dcp-to-hf`, then convert it here."
        )
    if manifest.expert_layout != EXPERT_LAYOUT:
        raise CheckpointError(
            f"{path}: expert_layout = {manifest.expert_layout!r}, this glmv trains {EXPERT_LAYOUT!r}; "
            "the two must not be mixed.\n"
            "Export it with the tool that wrote it, then convert it with `glmv convert hf-to-dcp`."
        )


def write_atomically(path: Path, content: str) -> None:
    """Write a small file through a temporary name: a reader sees the old content or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)

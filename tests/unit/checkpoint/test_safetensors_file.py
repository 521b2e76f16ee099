"""The safetensors files that glmv reads and writes itself, held against the library."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from glmv.checkpoint.errors import CheckpointError
from glmv.checkpoint.manifest import DTYPES
from glmv.checkpoint.safetensors_file import file_order, read_header, read_tensor, write_file

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def mixed_tensors() -> dict[str, torch.Tensor]:
    wide = [torch.int64, torch.float64, torch.float32, torch.int32, torch.bfloat16, torch.float16, torch.int16]
    narrow = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool]
    tensors = {f"of.{dtype}": torch.arange(6).view(2, 3).to(dtype) for dtype in wide + narrow}
    return tensors | {"empty": torch.empty(0, 4), "scalar": torch.tensor(3.5), "a.名": torch.ones(1)}


def write(path, tensors):
    shapes = {name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    return write_file(path, shapes, ((name, tensors[name]) for name in file_order(shapes)))


def test_written_bytes_are_the_library_s(tmp_path):
    tensors = mixed_tensors()
    total = write(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert total == sum(tensor.nbytes for tensor in tensors.values())


def test_read_tensors_are_the_library_s(tmp_path):
    path = tmp_path / "file"
    save_file(mixed_tensors(), path)
    ours = {name: read_tensor(path, name, entry) for name, entry in read_header(path).items()}
    theirs = load_file(path)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)


@pytest.mark.parametrize("cut", [1, 10, 100])
def test_a_truncated_file_names_itself_and_the_tensor(tmp_path, cut):
    path = tmp_path / "file"
    save_file({"first": torch.ones(99), "second": torch.ones(1)}, path)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=r"file: is truncated: (first|second) ends at byte .* Download it again"):
        read_header(path)


@pytest.mark.parametrize(
    "content", [b"", b"\x08\0\0", b"\xff" * 64, b"\x08" + b"\0" * 7 + b"not json", b"version https://git-lfs"]
)
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match="file: is no safetensors file"):
        read_header(tmp_path / "file")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "Q4", "shape": [2], "data_offsets": [0, 8]}, "w is stored as Q4"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, r"w: 8 bytes don't fit shape \(3,\)"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, entry, message):
    header = json.dumps({"w": entry}).encode()
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(CheckpointError, match=message):
        read_header(tmp_path / "file")


def test_nothing_stands_under_the_name_until_all_is_written(tmp_path):
    def fails_after_the_first():
        yield "a", torch.ones(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "file", {"a": ("F32", (1,)), "b": ("F32", (1,))}, fails_after_the_first())
    assert not (tmp_path / "file").exists()

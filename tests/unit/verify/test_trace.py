"""Parts that ranks wrote become whole tensors again, or the reader says what is wrong."""

import json

import pytest
import torch
from safetensors.torch import save_file

from glmv.verify.trace import load_whole, save_parts

WHOLE = torch.arange(12.0).reshape(4, 3)


def write(path, part, offset):
    save_file({"w": part.contiguous()}, path, metadata={"places": json.dumps({"w": [[4, 3], offset]})})
    return path


def test_plain_tensors_come_back(tmp_path):
    save_parts({"w": WHOLE, "scalar": torch.tensor(2.0)}, tmp_path / "a")
    found = load_whole([tmp_path / "a"])
    assert found["w"].equal(WHOLE)
    assert found["scalar"] == 2


def test_parts_are_put_in_their_places(tmp_path):
    paths = [write(tmp_path / "b", WHOLE[3:], [3, 0]), write(tmp_path / "a", WHOLE[:3], [0, 0])]
    assert load_whole(paths)["w"].equal(WHOLE)


def test_an_empty_part_holds_nothing(tmp_path):
    paths = [write(tmp_path / "a", WHOLE, [0, 0]), write(tmp_path / "b", WHOLE[:0], [4, 0])]
    assert load_whole(paths)["w"].equal(WHOLE)


def test_a_gap_is_told(tmp_path):
    with pytest.raises(ValueError, match="no rank holds all of w"):
        load_whole([write(tmp_path / "a", WHOLE[:3], [0, 0])])


def test_replicas_that_differ_are_told(tmp_path):
    paths = [write(tmp_path / "a", WHOLE, [0, 0]), write(tmp_path / "b", WHOLE + 1, [0, 0])]
    with pytest.raises(ValueError, match="w differs between ranks"):
        load_whole(paths)

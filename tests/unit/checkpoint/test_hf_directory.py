"""A Hugging Face directory: every way in which its files can contradict each other is told by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from glmv.checkpoint.errors import CheckpointError
from glmv.checkpoint.hf import INDEX, HfDirectory, side_files

NORM = "model.language_model.norm.weight"


def edit_index(directory, edit):
    index = json.loads((directory / INDEX).read_text())
    edit(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def edit_shard(directory, name, edit):
    path = directory / json.loads((directory / INDEX).read_text())["weight_map"][name]
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
    return path.name


def test_every_tensor_is_read_as_it_is(tiny_dir, hub_weights):
    hub, expected = HfDirectory(tiny_dir), hub_weights(tiny_dir)
    assert hub.records.keys() == expected.keys()
    assert all(torch.equal(hub.read(name), tensor) for name, tensor in expected.items())


def test_a_single_file_needs_no_index(tmp_path):
    save_file({"w": torch.arange(3.0)}, tmp_path / "model.safetensors")
    hub = HfDirectory(tmp_path)
    assert hub.records["w"].file == "model.safetensors"
    assert torch.equal(hub.read("w"), torch.arange(3.0))


def test_no_weights(tmp_path):
    with pytest.raises(CheckpointError, match=r"has neither model.safetensors.index.json nor model.safetensors"):
        HfDirectory(tmp_path)


def test_two_sets_of_weights_are_refused(hf_copy):
    save_file({"w": torch.arange(3.0)}, hf_copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has both .* and model.safetensors, and they need not agree"):
        HfDirectory(hf_copy)


def test_a_missing_shard_is_named_with_a_tensor_of_it(hf_copy):
    (hf_copy / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00004.safetensors: is missing, and .* \(model\.\S+"):
        HfDirectory(hf_copy)


def test_a_tensor_in_no_shard(hf_copy):
    file_name = edit_shard(hf_copy, NORM, lambda tensors: tensors.pop(NORM))
    with pytest.raises(CheckpointError, match=f"{file_name}: lacks {NORM}, which .*index.json lists in it"):
        HfDirectory(hf_copy)


def test_a_tensor_in_two_shards(hf_copy):
    edit_shard(hf_copy, "model.visual.patch_embed.proj.bias", lambda tensors: tensors.update({NORM: torch.ones(72)}))
    with pytest.raises(CheckpointError, match=rf"00001.*: holds {NORM}, but .* lists it in model-00004"):
        HfDirectory(hf_copy)


def test_a_tensor_that_the_index_does_not_list(hf_copy):
    edit_index(hf_copy, lambda weight_map: weight_map.pop(NORM))
    with pytest.raises(CheckpointError, match=f"holds {NORM}, but .* doesn't list it"):
        HfDirectory(hf_copy)


@pytest.mark.parametrize("file_name", ["../model-00001-of-00004.safetensors", "/etc/passwd", 3])
def test_an_index_that_leads_out_of_the_directory_is_refused(hf_copy, file_name):
    edit_index(hf_copy, lambda weight_map: weight_map.update({NORM: file_name}))
    with pytest.raises(CheckpointError, match="is no index of shards in this directory"):
        HfDirectory(hf_copy)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_a_damaged_index_is_refused(hf_copy, content):
    (hf_copy / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json: is no index"):
        HfDirectory(hf_copy)


def test_side_files_are_all_but_weights_and_hidden_files(hf_copy):
    for name in ("pytorch_model.bin", "training_args.pt", ".gitattributes", "LICENSE"):
        (hf_copy / name).write_text("x")
    names = {path.name for path in side_files(hf_copy)}
    assert names == {
        "LICENSE",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "video_preprocessor_config.json",
    }

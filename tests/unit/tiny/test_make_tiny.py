"""`make_tiny`: the same bytes for the same arguments, and nobody's files overwritten."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from glmv.checkpoint.hub_names import hub_tensors
from glmv.model.config import ModelConfig
from glmv.tiny.make import TinyError, make_tiny


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_another_process_writes_the_same_bytes(tiny_dir, tmp_path):
    environment = os.environ | {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2"}
    script = f"from glmv.tiny.make import make_tiny; make_tiny({str(tmp_path / 'again')!r})"
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    assert digests(tmp_path / "again") == digests(tiny_dir)


def test_another_seed_changes_the_weights_alone(tiny_dir, tmp_path):
    other, first = digests(make_tiny(tmp_path / "other", seed=1)), digests(tiny_dir)
    changed = {name for name in first if first[name] != other[name]}
    assert changed == {path.name for path in tiny_dir.glob("*.safetensors")} | {".make-tiny.json"}


def test_every_tensor_stands_in_the_shard_that_the_index_names(tiny_dir):
    index = json.loads((tiny_dir / "model.safetensors.index.json").read_text())
    found, total = {}, 0
    for path in sorted(tiny_dir.glob("*.safetensors")):
        with safe_open(path, "pt") as shard:
            found.update(dict.fromkeys(shard.keys(), path.name))
            total += sum(shard.get_tensor(name).nbytes for name in shard.keys())  # noqa: SIM118
    assert found == index["weight_map"]
    assert total == index["metadata"]["total_size"]


def test_the_weights_are_those_of_the_architecture(tiny_dir):
    expected = {tensor.name: (tensor.shape, tensor.dtype) for tensor in hub_tensors(ModelConfig.from_hf_dir(tiny_dir))}
    found = {}
    for path in tiny_dir.glob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        found.update({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()})
    assert found == expected


def test_one_layer_is_cut_across_two_shards(tiny_dir):
    weight_map = json.loads((tiny_dir / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {weight_map[name] for name in weight_map if ".layers.1.mlp.experts." in name}
    assert len(shards) == 2


def test_overrides_reach_config_and_weights(tmp_path):
    overrides = {"text_config": {"num_hidden_layers": 2, "n_routed_experts": 5}}
    directory = make_tiny(tmp_path / "tiny", config_overrides=overrides)
    assert ModelConfig.from_hf_dir(directory).text.n_routed_experts == 5
    names = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.language_model.layers.1.mlp.experts.4.up_proj.weight" in names
    assert "model.language_model.layers.2.input_layernorm.weight" not in names


def test_a_directory_of_other_things_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(TinyError, match=r"did not write, thesis.txt among them.\nChoose another .* --force"):
        make_tiny(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(TinyError, match="is a file"):
        make_tiny(tmp_path / "thesis.txt")


def test_force_replaces_the_weights_and_keeps_the_rest(tiny_dir, tmp_path):
    (tmp_path / "model.safetensors").write_text("stale weights, which transformers would prefer to the index")
    (tmp_path / "thesis.txt").write_text("mine")
    make_tiny(tmp_path, force=True)
    assert set(digests(tmp_path)) == set(digests(tiny_dir)) | {"thesis.txt"}


def test_an_earlier_output_is_replaced_without_asking(tiny_dir, tmp_path):
    make_tiny(tmp_path / "tiny", seed=3, config_overrides={"text_config": {"num_hidden_layers": 9}})
    assert digests(make_tiny(tmp_path / "tiny")) == digests(tiny_dir)

"""Both converters: every byte there and back, nothing lost on the way, every fault told by name."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from glmv.checkpoint.dcp import read_metadata
from glmv.checkpoint.dcp_to_hf import dcp_to_hf
from glmv.checkpoint.errors import CheckpointError
from glmv.checkpoint.hf import INDEX
from glmv.checkpoint.hf_to_dcp import hf_to_dcp
from glmv.checkpoint.manifest import read_manifest
from spec import layout as law

NORM = "model.language_model.norm.weight"
BIAS = "model.language_model.layers.1.mlp.gate.e_score_correction_bias"
EXPERT = "model.language_model.layers.2.mlp.experts.7.up_proj.weight"


def edit(directory, name, change):
    """Change the tensors of the shard that holds `name`; list additions in the index."""
    index = json.loads((directory / INDEX).read_text())
    path = directory / index["weight_map"][name]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    kept = {key: value for key, value in index["weight_map"].items() if value != path.name}
    index["weight_map"] = dict(sorted((kept | dict.fromkeys(tensors, path.name)).items()))
    index["metadata"]["total_size"] += sum(tensor.nbytes for key, tensor in tensors.items() if "extra" in key)
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


@pytest.fixture
def there_and_back(tmp_path):
    def convert(hf_dir, **prefixes):
        hf_to_dcp(hf_dir, tmp_path / "dcp", **prefixes)
        dcp_to_hf(tmp_path / "dcp", tmp_path / "export")
        return tmp_path / "export"

    return convert


def test_every_file_returns_byte_for_byte(tiny_dir, there_and_back, file_bytes):
    assert file_bytes(there_and_back(tiny_dir)) == file_bytes(tiny_dir)


def test_a_single_file_returns_byte_for_byte(hf_copy, there_and_back, file_bytes, hub_weights):
    weights = hub_weights(hf_copy)
    for path in (*hf_copy.glob("*.safetensors"), hf_copy / INDEX):
        path.unlink()
    save_file(weights, hf_copy / "model.safetensors", metadata={"format": "pt"})
    assert file_bytes(there_and_back(hf_copy)) == file_bytes(hf_copy)


def test_prefixes_return_byte_for_byte(tiny_dir, there_and_back, file_bytes, tmp_path):
    export = there_and_back(tiny_dir, dcp_prefix="backbone.", hf_prefix="model.")
    assert file_bytes(export) == file_bytes(tiny_dir)
    keys = dcp.FileSystemReader(tmp_path / "dcp" / "release").read_metadata().state_dict_metadata
    assert "model.backbone.language_model.norm.weight" in keys
    assert "model.backbone.lm_head.weight" in keys


def test_torch_s_own_reader_finds_the_law_s_stacked_tensors(tiny_dir, root, tmp_path, hub_weights):
    dcp_to_torch_save(root / "release", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    expected = {f"model.{name}": tensor for name, tensor in law.stacked(hub_weights(tiny_dir)).items()}
    assert found.keys() == expected.keys()
    assert all(found[key].dtype == expected[key].dtype for key in expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_router_bias_of_large_offset_and_small_spread_survives(hf_copy, there_and_back, hub_weights):
    bias = 34.5 + torch.arange(12) * 0.01
    edit(hf_copy, BIAS, lambda tensors: tensors.update({BIAS: bias}))
    returned = hub_weights(there_and_back(hf_copy))[BIAS]
    assert returned.dtype == torch.float32
    assert returned.numpy().tobytes() == bias.numpy().tobytes()


@pytest.mark.parametrize("prefix", ["model.language_model.layers.3.", "model.layers.46."])
def test_tensors_that_the_model_has_no_place_for_are_carried(hf_copy, there_and_back, file_bytes, tmp_path, prefix):
    extra = {f"{prefix}extra.{i}.weight": torch.randn(3, i + 1).to(torch.bfloat16) for i in range(5)}
    edit(hf_copy, NORM, lambda tensors: tensors.update(extra))
    assert file_bytes(there_and_back(hf_copy)) == file_bytes(hf_copy)
    assert read_manifest(tmp_path / "dcp" / "release").carried == sorted(extra)


def test_the_report_counts_carried_tensors(hf_copy, tmp_path):
    edit(hf_copy, NORM, lambda tensors: tensors.update({"model.layers.46.extra": torch.ones(2)}))
    report = hf_to_dcp(hf_copy, tmp_path / "dcp")
    assert report.tensors == 143
    assert report.notices == ("1 tensor(s) that the model has no place for are carried along: model.layers.46.extra.",)


def test_the_upstream_variable_is_accepted_with_a_notice(tiny_dir, tmp_path, monkeypatch, file_bytes, root):
    monkeypatch.setenv("GLM4V_DCP_3D", "0")
    report = hf_to_dcp(tiny_dir, tmp_path / "dcp")
    assert [notice for notice in report.notices if "GLM4V_DCP_3D has no effect" in notice]
    theirs, ours = file_bytes(root / "release"), file_bytes(tmp_path / "dcp" / "release")
    assert ours == theirs
    assert len(ours) == len(read_metadata(root / "release").state_dict_metadata) + 1


@pytest.mark.parametrize("name", [NORM, EXPERT, BIAS])
def test_an_incomplete_directory_is_refused(hf_copy, tmp_path, name):
    edit(hf_copy, name, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"1 tensor\(s\) that config.json asks for are missing: {name}\."):
        hf_to_dcp(hf_copy, tmp_path / "dcp")


def test_stacked_experts_in_the_directory_are_named_as_the_reason(hf_copy, tmp_path):
    def stack(tensors):
        del tensors[EXPERT]
        tensors["model.language_model.layers.2.mlp.experts.gate_up_proj"] = torch.zeros(12, 80, 72)

    edit(hf_copy, EXPERT, stack)
    with pytest.raises(CheckpointError, match="Its experts are stacked"):
        hf_to_dcp(hf_copy, tmp_path / "dcp")


def test_another_shape_is_refused(hf_copy, tmp_path):
    edit(hf_copy, EXPERT, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].T.contiguous()}))
    with pytest.raises(CheckpointError, match=rf"{EXPERT} has shape \(72, 40\), config.json asks for \(40, 72\)"):
        hf_to_dcp(hf_copy, tmp_path / "dcp")


def test_experts_of_different_dtypes_are_refused(hf_copy, tmp_path):
    edit(hf_copy, EXPERT, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].float()}))
    with pytest.raises(CheckpointError, match="have different dtypes"):
        hf_to_dcp(hf_copy, tmp_path / "dcp")


def test_a_root_in_use_is_refused(tiny_dir, root_copy, file_bytes):
    before = file_bytes(root_copy / "release")
    with pytest.raises(CheckpointError, match=r"holds a checkpoint already \(latest_.* Choose another --save-dir"):
        hf_to_dcp(tiny_dir, root_copy)
    assert file_bytes(root_copy / "release") == before


def test_a_conversion_that_fails_leaves_no_checkpoint(hf_copy, tmp_path, monkeypatch):
    def breaks(*args):
        raise OSError("disk full")

    monkeypatch.setattr("glmv.checkpoint.hf.read_tensor", breaks)
    with pytest.raises(CheckpointError, match="disk full"):
        hf_to_dcp(hf_copy, tmp_path / "dcp")
    assert list((tmp_path / "dcp").iterdir()) == []
    monkeypatch.undo()
    hf_to_dcp(hf_copy, tmp_path / "dcp")


def test_a_place_without_rights_is_told(tiny_dir, tmp_path, monkeypatch):
    def refuses(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.mkdir", refuses)
    with pytest.raises(CheckpointError, match=r"\.release\.tmp: Permission denied. Check space and rights"):
        hf_to_dcp(tiny_dir, tmp_path / "dcp")


def test_an_export_over_other_files_is_refused(root, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        dcp_to_hf(root, tmp_path)


def test_an_export_that_fails_leaves_nothing_under_its_name(root_copy, tmp_path):
    sorted((root_copy / "release").glob("*.distcp"))[-1].unlink()
    with pytest.raises(CheckpointError, match=r"distcp: is missing, and model\."):
        dcp_to_hf(root_copy, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_other_prefixes_than_the_recorded_are_refused(root, tmp_path):
    with pytest.raises(CheckpointError, match=r"--dcp-prefix 'model\.': .* was written with ''. Leave the option out"):
        dcp_to_hf(root, tmp_path / "export", dcp_prefix="model.")


def test_configs_can_come_from_another_directory(root, hf_copy, tmp_path, file_bytes):
    (hf_copy / "chat_template.jinja").write_text("another template")
    dcp_to_hf(root, tmp_path / "export", hf_dir=hf_copy)
    assert file_bytes(tmp_path / "export") == file_bytes(hf_copy)


def test_configs_of_another_model_are_refused(root, hf_copy, tmp_path):
    config = (hf_copy / "config.json").read_text()
    (hf_copy / "config.json").write_text(config.replace('"moe_intermediate_size": 40', '"moe_intermediate_size": 48'))
    with pytest.raises(CheckpointError, match=r"its config\.json is of another model"):
        dcp_to_hf(root, tmp_path / "export", hf_dir=hf_copy)


def edit_manifest(root, change):
    path = root / "release" / "glmv.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(expert_layout="E*H,2I"), r"expert_layout = 'E\*H,2I', this glmv trains 'E,H,2I'"),
        (lambda m: m.update(format=2), "format = 2, this glmv reads 1"),
        (lambda m: m.pop("expert_layout"), "expert_layout: Field required"),
        (lambda m: m["tensors"].pop(NORM), f"holds model.{NORM}, which its glmv.json doesn't list"),
        (
            lambda m: m["tensors"].update({"x": {"dtype": "F32", "shape": [1], "file": "a.safetensors"}}),
            "lacks model.x, which",
        ),
        (
            lambda m: m["tensors"][NORM].update(shape=[73]),
            rf"model.{NORM} has shape \(72,\), its glmv.json says \(73,\)",
        ),
        (lambda m: m["tensors"][NORM].update(file="../x.safetensors"), rf"tensors.{NORM}.file: String should match"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(root_copy, tmp_path, change, message):
    edit_manifest(root_copy, change)
    with pytest.raises(CheckpointError, match=message):
        dcp_to_hf(root_copy, tmp_path / "export")


def test_a_checkpoint_without_manifest_is_refused(root_copy, tmp_path):
    (root_copy / "release" / "glmv.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no glmv.json, so the layout .*\nConvert"):
        dcp_to_hf(root_copy, tmp_path / "export")

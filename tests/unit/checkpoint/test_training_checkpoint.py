"""Loading into a model and saving from training, in one process."""

import shutil

import pytest
import torch

from glmv.checkpoint.dcp_to_hf import dcp_to_hf
from glmv.checkpoint.errors import CheckpointError
from glmv.checkpoint.training import load_model, load_optimizer, resolve_checkpoint, save_checkpoint
from spec import layout as law

BIAS = "model.language_model.layers.1.mlp.gate.e_score_correction_bias"
NORM = "model.language_model.norm.weight"


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **options)


def random_step(model, optimizer, seed=0):
    """One optimizer step with made-up gradients."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


@pytest.fixture
def trained(root_copy, new_model):
    """A model and its optimizer one step after the release, and the root it came from."""
    model = new_model()
    load_model(model, root_copy / "release")
    optimizer = adamw(model, lr=1e-3, betas=(0.8, 0.9), weight_decay=0.25)
    random_step(model, optimizer)
    return root_copy, model, optimizer


def save(trained, iteration=7, **state):
    root, model, optimizer = trained
    return save_checkpoint(root, iteration, model, optimizer, state=state, assets_from=root / "release")


def test_a_loaded_model_has_the_published_weights(tiny_dir, root, new_model, hub_weights):
    model = new_model()
    load_model(model, root / "release")
    expected = law.stacked(hub_weights(tiny_dir))
    live = model.state_dict()
    assert live.keys() == expected.keys()
    assert all(torch.equal(live[name], tensor.float()) for name, tensor in expected.items())


def test_a_load_reports_every_change_of_dtype(root, new_model):
    report = load_model(new_model(), root / "release")
    assert report.tensors == 74
    assert report.dtype_changes[NORM] == (torch.bfloat16, torch.float32)
    assert BIAS not in report.dtype_changes
    assert report.lossy == {}


def test_a_load_that_rounds_is_reported_as_lossy(trained, new_model):
    report = load_model(new_model().bfloat16(), save(trained))
    assert report.lossy[NORM] == (torch.float32, torch.bfloat16)
    assert report.lossy == report.dtype_changes
    assert BIAS not in report.lossy


def test_a_tensor_of_the_model_that_the_checkpoint_lacks_is_named(root, new_model):
    model = new_model()
    model.model.visual.register_parameter("surplus", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(CheckpointError, match=r"1 tensor\(s\) of the model are missing .*: model.visual.surplus\."):
        load_model(model, root / "release")


def test_a_tensor_of_the_checkpoint_that_the_model_lacks_is_named(root, new_model):
    model = new_model()
    del model.model.language_model.layers[2]
    with pytest.raises(CheckpointError, match=r"are unknown to the model: model\.language_model\.layers\.2\.\S+, "):
        load_model(model, root / "release")


def test_another_shape_is_named_with_both_shapes(root, new_model):
    model = new_model()
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(641, 72))
    with pytest.raises(CheckpointError, match=r"lm_head.weight: \(640, 72\) in the checkpoint, \(641, 72\) in the mod"):
        load_model(model, root / "release")


def test_a_model_is_not_touched_by_a_refused_load(root, new_model):
    model = new_model()
    del model.model.visual.blocks[1]
    with pytest.raises(CheckpointError):
        load_model(model, root / "release")
    assert all(bool((tensor == 7e7).all()) for tensor in model.state_dict().values())


def test_a_damaged_file_is_named(root_copy, new_model):
    path = sorted((root_copy / "release").glob("*.distcp"))[3]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"release: .* Give another iteration"):
        load_model(new_model(), root_copy / "release")


def test_names_of_recomputed_and_compiled_modules_are_the_checkpoint_s(root, new_model):
    model = new_model()
    layers = model.model.language_model.layers
    layers[1] = torch.nn.ModuleDict({"_checkpoint_wrapped_module": layers[1]})
    layers[2] = torch.nn.ModuleDict({"_orig_mod": layers[2]})
    assert load_model(model, root / "release").tensors == 74


def test_a_saved_model_loads_bit_by_bit(trained, new_model):
    directory, again = save(trained), new_model()
    report = load_model(again, directory)
    expected, live = trained[1].state_dict(), again.state_dict()
    assert all(torch.equal(live[name], tensor) for name, tensor in expected.items())
    assert report.dtype_changes == {}


def test_optimizer_and_state_resume_bit_by_bit(trained, new_model):
    _, model, optimizer = trained
    directory = save(trained, iteration=7, consumed=128, lr=0.1)
    again = new_model()
    load_model(again, directory)
    resumed = adamw(again, lr=1.0)
    assert load_optimizer(again, resumed, directory) == {"consumed": 128, "lr": 0.1}
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert optimizer.state[one].keys() == resumed.state[other].keys()
        assert all(torch.equal(value, resumed.state[other][key]) for key, value in optimizer.state[one].items())
    options = [
        {key: value for key, value in each.param_groups[0].items() if key != "params"} for each in (optimizer, resumed)
    ]
    assert options[0] == options[1]


def test_the_next_step_after_resuming_is_the_one_of_an_unbroken_run(trained, new_model):
    _, model, optimizer = trained
    directory, again = save(trained), new_model()
    load_model(again, directory)
    resumed = adamw(again)
    load_optimizer(again, resumed, directory)
    random_step(model, optimizer, seed=1)
    random_step(again, resumed, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_parameter_that_never_had_a_gradient_resumes_without_state(root_copy, new_model):
    model = new_model()
    optimizer = adamw(model)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    optimizer.step()
    directory = save((root_copy, model, optimizer))
    again = new_model()
    resumed = adamw(again)
    load_optimizer(again, resumed, directory)
    assert list(resumed.state) == [again.lm_head.weight]


def test_an_optimizer_over_other_parameters_is_refused(trained, new_model):
    directory, again = save(trained), new_model()
    optimizer = torch.optim.AdamW([p for name, p in again.named_parameters() if name != NORM])
    with pytest.raises(CheckpointError, match=f"is over other parameters: {NORM}.\nTrain with the same model.freeze"):
        load_optimizer(again, optimizer, directory)


def test_a_release_has_no_optimizer(root, new_model):
    model = new_model()
    with pytest.raises(CheckpointError, match=r"holds no optimizer state\. Set training.no_load_optim: true"):
        load_optimizer(model, adamw(model), root / "release")


def test_weights_can_be_saved_alone(trained):
    root, model, _ = trained
    directory = save_checkpoint(root, 7, model, None, state={}, assets_from=root / "release")
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        load_optimizer(model, adamw(model), directory)


def test_a_training_checkpoint_exports_in_the_published_dtypes(trained, tiny_dir, tmp_path, hub_weights):
    save(trained)
    dcp_to_hf(trained[0], tmp_path / "export")
    exported, published = hub_weights(tmp_path / "export"), hub_weights(tiny_dir)
    assert {name: t.dtype for name, t in exported.items()} == {name: t.dtype for name, t in published.items()}
    live = law.per_expert(trained[1].state_dict())
    assert exported.keys() == live.keys()
    assert all(torch.equal(exported[name], tensor.to(exported[name].dtype)) for name, tensor in live.items())


def test_an_export_leaves_every_file_but_the_weights_as_published(trained, tiny_dir, tmp_path, file_bytes):
    save(trained)
    dcp_to_hf(trained[0], tmp_path / "export")
    exported, published = file_bytes(tmp_path / "export"), file_bytes(tiny_dir)
    assert exported.keys() == published.keys()
    assert {name for name in published if published[name] != exported[name]} == {
        path.name for path in tiny_dir.glob("*.safetensors")
    }


def test_an_export_does_not_read_optimizer_state(trained, tmp_path, monkeypatch):
    directory = save(trained)
    read = []
    monkeypatch.setattr(
        "glmv.checkpoint.dcp.TensorReader._read_chunk",
        lambda self, key, index, sizes: read.append(key) or torch.zeros(sizes),
    )
    dcp_to_hf(directory, tmp_path / "export")
    assert len(read) == 74
    assert not [key for key in read if not key.startswith("model.")]


def test_a_checkpoint_is_saved_from_the_side_files_of_another_iteration(trained):
    first = save(trained)
    root, model, optimizer = trained
    shutil.rmtree(root / "release")
    second = save_checkpoint(root, 8, model, optimizer, state={}, assets_from=first / "hf_assets")
    assert {path.name for path in (second / "hf_assets").iterdir()} == {
        path.name for path in (first / "hf_assets").iterdir()
    }


def test_a_model_that_the_side_files_do_not_describe_is_refused(trained):
    root, model, _ = trained
    del model.model.visual.blocks[1]
    with pytest.raises(CheckpointError, match=r"release: is of another model: model\.visual\.blocks\.1\.\S+, "):
        save_checkpoint(root, 7, model, None, state={}, assets_from=root / "release")


def test_the_tracker_follows_the_last_save(trained):
    assert resolve_checkpoint(trained[0]).name == "release"
    save(trained, iteration=7)
    assert resolve_checkpoint(trained[0]).name == "iter_0000007"


def test_an_iteration_saved_again_is_replaced(trained):
    save(trained, iteration=7, run=1)
    directory = save(trained, iteration=7, run=2)
    assert load_optimizer(trained[1], trained[2], directory) == {"run": 2}
    assert sorted(path.name for path in trained[0].iterdir()) == [
        "iter_0000007",
        "latest_checkpointed_iteration.txt",
        "release",
    ]


@pytest.mark.parametrize("broken", ["dcp.save", "shutil.copytree", "write_tracker", "Manifest.write"])
def test_an_interrupted_save_leaves_the_tracker_on_a_complete_checkpoint(trained, monkeypatch, new_model, broken):
    def breaks(*args, **kwargs):
        raise OSError(28, "No space left on device")

    save(trained, iteration=7)
    monkeypatch.setattr(f"glmv.checkpoint.training.{broken}", breaks)
    with pytest.raises((CheckpointError, OSError), match="No space left"):
        save(trained, iteration=8)
    assert resolve_checkpoint(trained[0]).name == "iter_0000007"
    load_model(new_model(), resolve_checkpoint(trained[0]))

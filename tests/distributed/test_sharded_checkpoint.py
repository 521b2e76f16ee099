"""A model sharded over two ranks: its checkpoint is the one of the whole model, and faults are told on every rank."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from glmv.checkpoint.dcp_to_hf import dcp_to_hf
from glmv.checkpoint.hf_to_dcp import hf_to_dcp
from glmv.checkpoint.training import load_model, load_optimizer, resolve_checkpoint
from glmv.model import Glm4vMoeForConditionalGeneration, ModelConfig
from spec import layout as law

pytestmark = pytest.mark.multirank


@pytest.fixture(scope="module")
def run(ranks, tiny_dir, tmp_path_factory):
    """What two ranks did: the root they worked in, their tensors, their messages."""
    out = tmp_path_factory.mktemp("sharded")
    hf_to_dcp(tiny_dir, out / "root")
    ended = ranks("checkpoint_worker.py", out / "root", out, nproc=2)
    assert ended.ok, ended.describe()
    messages = [json.loads((out / f"messages_{rank}.json").read_text()) for rank in range(2)]
    return SimpleNamespace(root=out / "root", messages=messages, **torch.load(out / "results.pt", weights_only=True))


@pytest.fixture(scope="module")
def whole(run, tiny_dir):
    """The saved checkpoint in one unsharded model, with its optimizer."""
    model = Glm4vMoeForConditionalGeneration(ModelConfig.from_hf_dir(tiny_dir))
    optimizer = torch.optim.AdamW(model.parameters())
    directory = resolve_checkpoint(run.root)
    load_model(model, directory)
    assert load_optimizer(model, optimizer, directory) == {"a": 1}
    return model, optimizer


def assert_same(tensors, expected):
    assert tensors.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(tensors[name], expected[name].to(tensors[name].dtype))] == []


def test_the_shards_of_a_release_are_the_published_weights(run, tiny_dir):
    published = {name: t for path in tiny_dir.glob("*.safetensors") for name, t in load_file(path).items()}
    assert_same(run.loaded, law.stacked(published))


def test_two_ranks_load_what_two_ranks_saved(run):
    assert_same(vars(run)["model again"], run.model)
    assert_same(vars(run)["optimizer again"], run.optimizer)


def test_one_process_loads_what_two_ranks_saved(run, whole):
    assert_same(whole[0].state_dict(), run.model)


def test_one_process_loads_the_optimizer_that_two_ranks_saved(run, whole):
    model, optimizer = whole
    names = {parameter: name for name, parameter in model.named_parameters()}
    entries = {f"{names[p]}.{entry}": value for p, state in optimizer.state.items() for entry, value in state.items()}
    assert_same(entries, run.optimizer)


def test_the_export_puts_the_shards_of_two_ranks_together(run, tmp_path):
    dcp_to_hf(run.root, tmp_path / "export")
    exported = {name: t for path in (tmp_path / "export").glob("*.safetensors") for name, t in load_file(path).items()}
    assert_same(exported, law.per_expert(run.model))


def test_an_unknown_layer_is_told_on_every_rank(run):
    first, second = (messages["missing layer"] for messages in run.messages)
    assert first == second
    assert "unknown to the model: model.language_model.layers.2." in first


def test_a_failure_of_rank_0_alone_is_raised_on_every_rank(run):
    first, second = (messages["rank 0 alone fails"] for messages in run.messages)
    assert first == second
    assert "hf_assets" in first
    assert resolve_checkpoint(run.root).name == "iter_0000001"

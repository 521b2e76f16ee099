"""What the schema knows and the trainer cannot do is refused by name."""

import pytest

from glmv.config import load_config, unbuilt
from glmv.config.unbuilt import _BUILT


def test_the_published_config_can_be_trained(published):
    assert unbuilt(load_config(published)) == []


def test_both_kinds_of_chunked_loss_can_be_trained(published):
    other = ["features.enable_chunk_loss=false", "features.enable_dynamic_chunk_loss=true"]
    assert unbuilt(load_config(published, other)) == []


@pytest.mark.parametrize(
    "override",
    [
        "parallel.tensor_parallel_size=2",
        "features.enable_activation_offload=true",
        "training.optimizer=muon",
        "training.save_async=true",
        "tools.profile.enable=true",
        "tools.memory_profile.enable=true",
        "data.dataset_param.dataset_type=webdataset",
        "data.dataset_param.attr.videos=videos",
        "data.dataset_param.basic_parameters.template=qwen2_vl",
        "model.attn_implementation=flash_attention_3",
    ],
)
def test_each_choice_is_named(override, published):
    (sentence,) = unbuilt(load_config(published, [override]))
    assert sentence.startswith(override.partition("=")[0] + " = ")


@pytest.mark.parametrize("loss_type", ["raw", "default", "per_sample_loss", "per_token_loss"])
def test_every_loss_type_can_be_trained(loss_type, published):
    assert unbuilt(load_config(published, [f"features.loss_cfg.loss_type={loss_type}"])) == []


@pytest.mark.parametrize("key", ["ring_attention_size", "ulysses_parallel_size"])
def test_sequences_can_be_shared(key, published):
    assert unbuilt(load_config(published, [f"parallel.{key}=2"])) == []


@pytest.mark.parametrize("path", [path for path, _, _ in _BUILT])
def test_each_rule_speaks_of_a_key_that_exists(path):
    from glmv.config.keys import all_keys

    assert tuple(path.split(".")) in all_keys()

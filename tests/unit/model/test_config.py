import copy
import json
import logging
from pathlib import Path

import pytest
from pydantic import ValidationError
from transformers import Glm4vMoeConfig

from glmv.model import ConfigError, ModelConfig

REAL = json.loads((Path(__file__).parents[2] / "data" / "glm45v_config.json").read_text())
ROPE = {"rope_theta": 5000.0, "partial_rotary_factor": 0.25, "mrope_section": [4, 6, 6]}
SPELLINGS = {
    "top_level": ROPE,
    "rope_scaling": {"rope_scaling": {"rope_type": "default", **ROPE}},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", **ROPE}},
    "hub": {**ROPE, "mrope_section": None, "rope_scaling": {"type": "default", "mrope_section": [4, 6, 6]}},
    "old_beside_new": {"rope_theta": 1.0, "rope_scaling": {"mrope_section": [9]}, "rope_parameters": ROPE},
}


def config_with(text=None, vision=None, **root):
    """The real config.json with some keys replaced; None removes a key."""
    config = copy.deepcopy(REAL) | root
    for part, changes in (("text_config", text), ("vision_config", vision)):
        merged = config[part] | (changes or {})
        config[part] = {key: value for key, value in merged.items() if value is not None}
    return config


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_rope(spelling):
    rope = {"rope_theta": None, "partial_rotary_factor": None, "rope_scaling": None} | SPELLINGS[spelling]
    text = ModelConfig.from_hf(config_with(rope)).text
    assert (text.rope_theta, text.rotary_dim, text.mrope_section) == (5000.0, 32, (4, 6, 6))


PLACES = {
    "top_level": {"partial_rotary_factor": 0.5},
    "rope_scaling": {"rope_scaling": {"partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}},
    "rope_parameters": {"rope_parameters": {"partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}},
    "absent": {},
}


@pytest.mark.parametrize("place", PLACES)
def test_wherever_the_rotary_share_stands_it_is_the_same_model(place):
    rope = {"partial_rotary_factor": None} | PLACES[place]
    assert ModelConfig.from_hf(config_with(rope)) == ModelConfig.from_hf(REAL)


def test_what_transformers_5_writes_is_the_same_model(tiny_dir, tmp_path):
    Glm4vMoeConfig.from_pretrained(tiny_dir).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in written["text_config"]
    assert "rope_scaling" not in written["text_config"]
    assert ModelConfig.from_hf_dir(tmp_path) == ModelConfig.from_hf_dir(tiny_dir)


def test_half_of_the_head_rotates_where_the_file_does_not_say():
    assert ModelConfig.from_hf(config_with({"partial_rotary_factor": None})).text.rotary_dim == 64


def test_an_integer_theta_is_a_number_too():
    assert ModelConfig.from_hf(config_with({"rope_theta": 10000})).text.rope_theta == 10000.0


def test_head_dim_follows_from_the_heads_where_they_divide():
    text = {"head_dim": None, "num_attention_heads": 64, "mrope_section": [4, 6, 6], "rope_scaling": None}
    assert ModelConfig.from_hf(config_with(text)).text.head_dim == 64


FAULTS = {
    "mrope_section": (
        {"text": {"rope_scaling": {"mrope_section": [8, 12, 11]}}},
        r"\[8, 12, 11\] sums to 31, .* is 32",
    ),
    "rope_type": ({"text": {"rope_scaling": {"rope_type": "yarn"}}}, "text_config: rope_type = 'yarn'"),
    "rope_scaling": ({"text": {"rope_scaling": [1]}}, r"rope_scaling = \[1\] is no object"),
    "kv_heads": (
        {"text": {"num_key_value_heads": 7}},
        "heads = 96 is no multiple of num_key_value_heads = 7",
    ),
    "top_k": ({"text": {"num_experts_per_tok": 129}}, "num_experts_per_tok = 129 exceeds the 128 experts"),
    "top_k_of_groups": (
        {"text": {"n_group": 32, "topk_group": 1}},
        r"num_experts_per_tok = 8 exceeds the 4 experts .*n_group 32, topk_group 1",
    ),
    "groups": ({"text": {"n_group": 3}}, "n_routed_experts = 128 is no multiple of n_group = 3"),
    "lone_experts": ({"text": {"n_group": 128, "topk_group": 64}}, "n_group = 128 leaves 1 expert a group"),
    "topk_group": ({"text": {"topk_group": 2}}, "topk_group = 2 exceeds n_group = 1"),
    "dense_layers": (
        {"text": {"first_k_dense_replace": 47}},
        "dense_replace = 47 exceeds num_hidden_layers = 46",
    ),
    "head_dim": ({"text": {"head_dim": None}}, "head_dim is missing, and hidden_size is no multiple"),
    "qk_norm": ({"text": {"use_qk_norm": True}}, "use_qk_norm = True: only False is built"),
    "text_type": (
        {"text": {"model_type": "glm4_moe"}},
        "text_config: model_type = 'glm4_moe': only 'glm4v_moe_text' is built",
    ),
    "root_type": ({"model_type": "glm4v"}, "model_type = 'glm4v': only 'glm4v_moe' is built"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}: only None is built"),
    "softmax": ({"text": {"scoring_func": "softmax"}}, "scoring_func = 'softmax': only 'sigmoid' is built"),
    "dropout": ({"vision": {"hidden_dropout_prob": 0.1}}, "hidden_dropout_prob = 0.1: only 0 is built"),
    "unknown_text": (
        {"text": {"num_expert_per_tok": 4}},
        "text_config: num_expert_per_tok = 4 is not a known key, and would have no effect here. "
        "Did you mean num_experts_per_tok",
    ),
    "foreign_text": (
        {"text": {"sliding_window": 4096}},
        "text_config: sliding_window = 4096 is not a known key, and would have no effect here. Take it out if",
    ),
    "unknown_vision": (
        {"vision": {"patchsize": 7}},
        "vision_config: patchsize = 7 is not a known key.* Did you mean patch_size",
    ),
    "unknown_rope": (
        {"text": {"rope_scaling": {"mrope_section": [8, 12, 12], "factor": 4.0}}},
        "text_config: rope_scaling.factor = 4.0 is not a known key",
    ),
    "activation": ({"vision": {"hidden_act": "gelu"}}, "vision_config: hidden_act = 'gelu': only 'silu' is built"),
    "widths": (
        {"vision": {"out_hidden_size": 4095}},
        r"= 4095 differs from text_config.hidden_size = 4096",
    ),
    "vision_heads": ({"vision": {"num_heads": 5}}, "hidden_size = 1536 is no multiple of num_heads = 5"),
    "axial": ({"vision": {"num_heads": 256}}, "hidden_size / num_heads = 6 is no multiple of 4"),
    "table": ({"vision": {"image_size": 337}}, "image_size = 337 is no multiple of patch_size = 14"),
    "image_token": ({"image_token_id": 151552}, "image_token_id = 151552 is outside text_config.vocab_size = 151552"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings = True is not built"),
    "tied_in_text": ({"text": {"tie_word_embeddings": True}}, "tie_word_embeddings = True is not built"),
    "type": ({"text": {"hidden_size": "4096"}}, "text_config.hidden_size = '4096': Input should be a valid integer"),
    "missing": ({"text": {"vocab_size": None}}, "text_config.vocab_size is missing"),
    "negative": ({"vision": {"depth": -1}}, "vision_config.depth = -1: Input should be greater than 0"),
    "no_vision": ({"vision_config": None}, "vision_config is missing or no object"),
}


HARMLESS = {"torch_dtype": "bfloat16", "use_cache": True, "initializer_range": 0.01, "attention_dropout": 0.0}


@pytest.mark.parametrize("part", ["text", "vision"])
def test_keys_without_effect_are_passed_over(part):
    changed = config_with(**{part: HARMLESS | {"transformers_version": "4.55.0"}})
    changed[f"{part}_config"]["sliding_window"] = None  # null sets nothing
    assert ModelConfig.from_hf(changed) == ModelConfig.from_hf(REAL)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_file_key_and_value(fault):
    changes, message = FAULTS[fault]
    config = REAL | changes if "vision_config" in changes else config_with(**changes)
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_hf(config, source="model/config.json")
    assert str(caught.value).startswith("model/config.json: ")


def test_several_faults_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf(config_with({"vocab_size": 0}, {"depth": 0}))
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ("{", "not valid JSON"), ("[1]", "holds list, not a JSON object")],
)
def test_an_unreadable_file(content, message, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_hf_dir(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_router_that_cannot_learn_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        ModelConfig.from_hf(config_with({"num_experts_per_tok": 1}))
    assert "the router never learns" in caplog.text


def test_a_config_does_not_change():
    with pytest.raises(ValidationError, match="frozen"):
        ModelConfig.from_hf(REAL).text.hidden_size = 1

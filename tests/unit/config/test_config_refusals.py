"""Every fault of a config is told by file, key and value, with the way out."""

import pytest

from glmv.config import ConfigError, load_config

# What is changed in the published config: (text, replacement, what is said).
UNKNOWN = {
    "section": ("training:\n", "trainning:\n", "trainning (a section) is not a known key.\nDid you mean training?"),
    "key": ("  seed: 1234", "  seeed: 1234", "training.seeed = 1234 is not a known key.\nDid you mean training.seed?"),
    "top_level": ("parallel:\n", "lr: 3\nparallel:\n", "lr = 3 is in the wrong section.\nIts place is training.lr."),
    "other_section": (
        "  ring_attention_size: 1",
        "  recompute: true",
        "parallel.recompute = true is in the wrong section.\nIts place is features.recompute.",
    ),
    "typo_in_other_section": (
        "  ring_attention_size: 1",
        "  weight_decy: 0.1",
        "parallel.weight_decy = 0.1 is not a known key.\nDid you mean training.weight_decay?",
    ),
    "nested": (
        "      cutoff_len: 1024",
        "      cut_off_len: 1024",
        "data.dataset_param.basic_parameters.cut_off_len = 1024 is not a known key.\n"
        "Did you mean data.dataset_param.basic_parameters.cutoff_len?",
    ),
    "same_name_in_many_sections": (
        "  recompute_plan:\n    apply_modules:",
        "  recompute_plan:\n    apply_moduls:",
        "features.recompute_plan.apply_moduls (a list) is not a known key.\n"
        "Did you mean features.recompute_plan.apply_modules?",
    ),
    "stranger": (
        "    router_aux_loss_coef: 0.0",
        "    zzz: 1",
        "features.loss_cfg.zzz = 1 is not a known key.\n"
        "features.loss_cfg has the keys loss_type, router_aux_loss_coef.",
    ),
}
VALUES = {
    "text_for_integer": (
        "expert_parallel_size: 16",
        'expert_parallel_size: "two"',
        "parallel.expert_parallel_size = 'two' must be an integer.\nRanks that share one copy of the routed experts.",
    ),
    "digits_in_quotes": (
        "  seed: 1234",
        '  seed: "1234"',
        "training.seed = '1234' must be an integer.\n"
        "Seed of sample order and of every random number; the same on all ranks.",
    ),
    "zero_ranks": (
        "expert_parallel_size: 16",
        "expert_parallel_size: 0",
        "parallel.expert_parallel_size = 0 must be at least 1.\nRanks that share one copy of the routed experts.",
    ),
    "union": (
        "fully_shard_parallel_size: auto",
        "fully_shard_parallel_size: atuo",
        "parallel.fully_shard_parallel_size = 'atuo' must be an integer or 'auto'.\n"
        "Ranks that share one copy of the parameters; `auto` means all ranks.",
    ),
    "choice": (
        "optimizer: adamw",
        "optimizer: adam",
        "training.optimizer = 'adam' must be 'adamw', 'adamw_swap' or 'muon'. Did you mean adamw?\nOptimizer.",
    ),
    "list_item": (
        "apply_modules:\n      - model.visual\n",
        "apply_modules:\n      - 7\n",
        "parallel.fsdp_plan.apply_modules[0] = 7 must be a string.\n"
        "Module patterns: `{*}` stands for one integer, `{a-b}` for an integer range, `*` for any characters.",
    ),
    "nan": (
        "lr: 1.0e-5",
        "lr: .nan",
        "training.lr = nan must be a finite number.\nHighest learning rate, reached at the end of the warmup.",
    ),
    "number_for_boolean": (
        "load_strict: true",
        "load_strict: 1",
        "training.load_strict = 1 must be true or false.\nStop on missing and on unexpected keys.",
    ),
    "empty_section": (
        "  memory_profile:\n    enable: false",
        "  memory_profile:",
        "tools.memory_profile = null must be a section, that is keys with values below it.\nMemory snapshot.",
    ),
    "aux_loss": (
        "router_aux_loss_coef: 0.0",
        "router_aux_loss_coef: 0.01",
        "features.loss_cfg.router_aux_loss_coef = 0.01 must be 0: GLM-4.5V has no auxiliary routing loss "
        "(e_score_correction_bias balances it).",
    ),
    "chunks_of_another_module": (
        "    apply_module: lm_head",
        "    apply_module: model.language_model.embed_tokens",
        "features.chunkloss_plan.apply_module = 'model.language_model.embed_tokens' must be 'lm_head'.\n"
        "The output projection whose logits are computed in chunks; GLM-4.5V has one.",
    ),
    "plugin": (
        "mindspeed_mm/fsdp/models/glm4_5v",
        "my/plugin",
        "training.plugin (a list) names my/plugin, and glmv loads no plugins; it accepts "
        "mindspeed_mm/fsdp/models/glm4_5v and mindspeed_mm/fsdp/data/datasets/huggingface, whose parts are built in.",
    ),
    "missing": (
        "    dataset_type: huggingface\n",
        "",
        "data.dataset_param.dataset_type is missing.\n"
        "Add it: Kind of data set; `huggingface` is a JSON file of conversations.",
    ),
}
RULES = {
    "two_chunk_losses": (
        "enable_dynamic_chunk_loss: false",
        "enable_dynamic_chunk_loss: true",
        "features.enable_chunk_loss = true and enable_dynamic_chunk_loss = true exclude each other.\n"
        "Turn one of them off.",
    ),
    "two_target_rules": (
        "train_on_prompt: false\n      mask_history: false",
        "train_on_prompt: true\n      mask_history: true",
        "data.dataset_param.basic_parameters.train_on_prompt = true and mask_history = true exclude each other.\n"
        "Turn one of them off.",
    ),
    "schedule": ("lr: 1.0e-5", "lr: 1e-5\n  lr_min: 1", "training.lr_min = 1.0 must not be larger than lr = 1e-05."),
    "pixels": (
        "image_min_pixels: 1024",
        "image_min_pixels: 300000",
        "data.dataset_param.preprocess_parameters.image_min_pixels = 300000 must not be larger than "
        "image_max_pixels = 262144.",
    ),
    "hf_weights": (
        "load_format: dcp\n  load_strict: true\n  no_load_optim: true",
        "load_format: hf\n  load_strict: true\n  no_load_optim: false",
        "training.load_format = 'hf' brings weights only.\n"
        "Set no_load_optim and no_load_rng to true, or load_format to dcp.",
    ),
}
SYNTAX = {
    "twice": (
        "  seed: 1234",
        "  seed: 1234\n  seed: 1234",
        "x.yaml: training.seed is written twice, in line 103 and in line 104.\nKeep one.",
    ),
    "tab": (
        "  seed: 1234",
        "\tseed: 1234",
        "x.yaml, line 103, column 1: not YAML (found character '\\t' that cannot start any token).\n"
        "Check indentation, colons and quotes there.",
    ),
    "indent": (
        "  seed: 1234",
        "   seed: 1234",
        "x.yaml, line 103, column 8: not YAML (mapping values are not allowed here).\n"
        "Check indentation, colons and quotes there.",
    ),
}


@pytest.mark.parametrize("case", [*UNKNOWN, *VALUES, *RULES])
def test_a_wrong_key_or_value_is_told(refusal, case):
    old, new, said = (UNKNOWN | VALUES | RULES)[case]
    assert refusal(old, new) == f"x.yaml: {said}"


@pytest.mark.parametrize("case", SYNTAX)
def test_broken_yaml_is_told_with_its_line(refusal, case):
    old, new, said = SYNTAX[case]
    assert refusal(old, new) == said


def test_all_faults_are_told_at_once(refusal):
    said = refusal("  seed: 1234\n  lr: 1.0e-5", "  seeed: 1234\n  lr: fast")
    assert said.count("x.yaml: ") == 2
    assert "training.seeed = 1234" in said
    assert "training.lr = 'fast' must be a number" in said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.seeed=3", "override training.seeed=3: training.seeed = 3 is not a known key."),
        ("lr=1", "override lr=1: lr = 1 is in the wrong section.\nIts place is training.lr."),
        ("training.lr.x=1", "training.lr.x = 1 is not a known key.\ntraining.lr holds no keys."),
        (
            "training.lr",
            "override training.lr: not of the form section.key=value.\nWrite for example training.lr",
        ),
        ("training.seed=two", "override training.seed=two: training.seed = 'two' must be an integer."),
        ("features.enable_dynamic_chunk_loss=true", "x.yaml with features.enable_dynamic_chunk_loss=true: features.en"),
        ("model.freeze=[a", "override model.freeze=[a, line 1, column 3: not YAML"),
    ],
)
def test_a_wrong_override_is_told_as_such(refusal, override, said):
    assert said in refusal("", "", override)


def test_an_override_cannot_mend_a_section_that_is_none(refusal):
    said = refusal("  memory_profile:\n    enable: false", "  memory_profile: 3", "tools.memory_profile.enable=true")
    assert said.startswith("override tools.memory_profile.enable=true: tools.memory_profile is 3 in the file")


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "no.yaml")
    assert str(caught.value) == f"{tmp_path}/no.yaml: no such file.\nGive the path of a YAML training config."


@pytest.mark.parametrize(("content", "what"), [(b"", "nothing"), (b"- 1", "a list"), (b"word", "a single value")])
def test_a_file_without_sections_is_told(tmp_path, content, what):
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"x.yaml: holds {what} where the sections of a training config should be"):
        load_config(path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00a", b"a: \x01"])
def test_a_file_that_is_no_text_is_told(tmp_path, content):
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"not YAML|cannot be read"):
        load_config(path)

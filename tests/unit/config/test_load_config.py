"""What a config file says is what the trainer sees."""

import pytest
import torch
import yaml

from glmv.config import load_config, torch_dtype
from glmv.config.keys import all_keys, child, section_at


def leaves(node, path=()):
    if isinstance(node, dict):
        return {leaf: value for key, inner in node.items() for leaf, value in leaves(inner, (*path, key)).items()}
    return {path: node}


def test_every_value_of_the_published_config_arrives(published):
    written = leaves(yaml.safe_load(published.read_text()))
    loaded = leaves(load_config(published).model_dump())
    assert len(written) == 100
    assert {path: loaded[path] for path in written} == written


def test_an_anchor_carries_its_value(changed):
    config = load_config(changed("&MM_MODEL_LOAD_PATH ./ckpt/mm_path/GLM-4.5V", "&MM_MODEL_LOAD_PATH ./elsewhere"))
    assert config.training.load == config.model.model_name_or_path == "./elsewhere"


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.e-5", "1.0e-5", "0.00001", "1.0e-05", "+1e-5"])
def test_a_number_is_a_number_without_a_dot(changed, text):
    assert load_config(changed("lr: 1.0e-5", f"lr: {text}")).training.lr == 1e-5


def test_an_integer_serves_as_a_float(changed):
    lr = load_config(changed("lr: 1.0e-5", "lr: 1")).training.lr
    assert (lr, type(lr)) == (1.0, float)


def test_left_out_sections_have_defaults(changed):
    config = load_config(changed("  clip_grad: 0.0\n", ""))
    assert config.training.clip_grad == 1.0
    assert (config.training.adam_beta1, config.training.adam_beta2, config.training.adam_eps) == (0.9, 0.999, 1e-8)
    assert config.features.recompute_plan.use_reentrant is False


def test_overrides_are_yaml_and_the_last_one_holds(published):
    config = load_config(
        published,
        ["training.lr=1e-6", "training.lr=2e-6", "training.load=", "model.freeze=[model.visual, lm_head]"],
    )
    assert config.training.lr == 2e-6
    assert config.training.load is None
    assert config.model.freeze == ["model.visual", "lm_head"]


def test_an_override_in_an_alias_leaves_the_anchor(changed):
    plans = "  recompute_plan: &PLAN {apply_modules: [a]}\n  activation_offload_plan: *PLAN\n"
    text = changed().read_text()
    begin, end = text.index("  recompute_plan:"), text.index("  enable_ep_balance:")
    features = load_config(changed(text[begin:end], plans), ["features.recompute_plan.apply_modules=[b]"]).features
    assert features.recompute_plan.apply_modules == ["b"]
    assert features.activation_offload_plan.apply_modules == ["a"]


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path, published):
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + published.read_bytes())
    assert load_config(path) == load_config(published)


def test_every_key_carries_a_description():
    fields = [(path, section_at(path[:-1]).model_fields[path[-1]]) for path in all_keys()]
    assert [".".join(path) for path, field in fields if not field.description] == []
    assert all(child(section_at(path[:-1]), path[-1]) or field.annotation is not None for path, field in fields)


def test_a_config_cannot_be_changed(published):
    config = load_config(published)
    with pytest.raises(Exception, match="frozen"):
        config.training.lr = 1.0


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32), ("fp64", torch.float64), (None, None)],
)
def test_number_formats_have_torch_names(name, dtype):
    assert torch_dtype(name) is dtype

import pytest
from torch import nn

from glmv.parallel.patterns import Pattern, PatternError, select, select_modules

NAMES = ["model.visual", "model.visual.blocks.0", "model.visual.blocks.11", "model.layers.3.mlp.gate", "lm_head"]

COVERED = {
    "lm_head": ["lm_head"],
    "model.visual.blocks.{*}": ["model.visual.blocks.0", "model.visual.blocks.11"],
    "model.visual.blocks.{1-11}": ["model.visual.blocks.11"],
    "model.visual.blocks.{0-0}": ["model.visual.blocks.0"],
    "model.visual.blocks.?": ["model.visual.blocks.0"],
    "*.mlp.gate": ["model.layers.3.mlp.gate"],
    "model.visual*": ["model.visual", "model.visual.blocks.0", "model.visual.blocks.11"],
    "*.{*}.mlp.*": ["model.layers.3.mlp.gate"],
}


@pytest.mark.parametrize("text", COVERED)
def test_a_pattern_covers(text):
    assert [name for name in NAMES if Pattern(text).matches(name)] == COVERED[text]


@pytest.mark.parametrize("name", ["visual.blocks.x", "visual.blocks.", "a.visual.blocks.1", "visual.blocks.1.mlp"])
def test_a_pattern_is_anchored_on_both_sides(name):
    assert not Pattern("visual.blocks.{*}").matches(name)


@pytest.mark.parametrize("name", ["modelXvisual", "model.visual\n"])
def test_a_dot_is_only_a_dot_and_a_name_ends_where_it_ends(name):
    assert not Pattern("model.visual").matches(name)


@pytest.mark.parametrize("text", ["a.{}", "a.{1,2}", "a.{0-20,22-40}", "a.{x}", "a.{5-2}", "a.{*", "a.*}"])
def test_other_braces_are_refused_with_the_pattern_in_the_message(text):
    with pytest.raises(PatternError) as caught:
        Pattern(text)
    assert text in str(caught.value)


def test_every_pattern_of_a_list_must_match():
    with pytest.raises(PatternError) as caught:
        select(NAMES, ["lm_head", "model.visul.blocks.{*}"], key="parallel.fsdp_plan.apply_modules")
    assert "parallel.fsdp_plan.apply_modules" in str(caught.value)
    assert "model.visul.blocks.{*}" in str(caught.value)
    assert "model.visual.blocks.0" in str(caught.value)


def test_a_bad_pattern_of_a_list_is_told_with_its_key():
    with pytest.raises(PatternError, match=r"^model\.freeze: "):
        select(NAMES, ["a.{}"], key="model.freeze")


def test_selected_modules_come_in_the_order_of_the_model():
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.ModuleList([nn.Linear(1, 1)])})
    assert list(select_modules(model, ["b.{*}", "a"], key="k")) == ["a", "b.0"]

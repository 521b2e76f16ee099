"""The reference page is what the command prints, and it tells the truth about keys without effect."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import glmv
from glmv.cli import app
from glmv.config.keys import all_keys, child, section_at
from glmv.config.reference import reference
from glmv.config.unbuilt import _WITHOUT_EFFECT, built_values, without_effect

ROOT = Path(glmv.__file__).parents[1]
LEAVES = [".".join(path) for path in all_keys() if not child(section_at(path[:-1]), path[-1])]
# One value is all the schema takes, so that nothing has to look at it; or it is compared, and nothing follows from it.
SINGLE = (
    "parallel.data_parallel_size",
    "data.dataloader_param.dataloader_mode",
    "data.dataloader_param.sampler_type",
    "data.dataloader_param.collate_param.collator_id",
    "model.model_id",
    "features.loss_cfg.router_aux_loss_coef",
    "features.chunkloss_plan.apply_module",
)


def test_the_page_is_what_the_command_prints():
    printed = CliRunner().invoke(app, ["config-reference"])
    assert printed.exit_code == 0
    said = "Write it anew: glmv config-reference > docs/config-reference.md"
    assert printed.output == (ROOT / "docs" / "config-reference.md").read_text(encoding="utf-8"), said


def test_the_page_has_every_key_once():
    page = reference()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [path.rpartition(".")[2] for path in ordered()]


def ordered():
    """Keys as the page orders them: a section's own keys first."""
    found = []
    for section in ["", *(".".join(path) for path in all_keys() if child(section_at(path[:-1]), path[-1]))]:
        found += [leaf for leaf in LEAVES if leaf.rpartition(".")[0] == section]
    return found


@pytest.mark.parametrize(
    "row",
    [
        "| `lr_decay_style` | `constant`, `linear`, `cosine` | `constant` | yes | How the learning rate falls",
        "| `fully_shard_parallel_size` | integer (at least 1) or `auto` | `auto` | yes | Ranks",
        "| `hook_modules` | list of text or `null` | `null` | only `null` or `[]` | Modules whose hooks",
        "| `adam_beta1` | number (at least 0, below 1) | `0.9` | yes | AdamW's decay",
        "| `dataset` | text | required | yes | Data file",
        "| `load_strict` | true or false | `false` | no effect: missing and unexpected keys always stop the run | ",
    ],
)
def test_a_row_tells_type_limits_default_and_state(row):
    assert f"\n{row}" in reference()


@pytest.mark.parametrize("path", _WITHOUT_EFFECT)
def test_what_is_without_effect_exists(path):
    assert tuple(path.split(".")) in all_keys()


def test_every_other_key_is_read_by_the_machine():
    files = [path for path in (ROOT / "glmv").rglob("*.py") if path.parent.name not in ("config", "verify")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    claimed = [leaf for leaf in LEAVES if not built_values(leaf) and not without_effect(leaf) and leaf not in SINGLE]
    read = re.compile(r"(?:\.|\")(\w+)\b")
    names = set(read.findall(source))
    assert [leaf for leaf in claimed if leaf.rpartition(".")[2] not in names] == []

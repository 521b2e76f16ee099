"""What a run reads must be what its checkpoint will be exported with."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer, Glm4vMoeConfig
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

from glmv.checkpoint.hf_to_dcp import hf_to_dcp
from glmv.config import load_config
from glmv.parallel.process import AgreedError, process_group
from glmv.train.assets import AssetsError, refuse_other_assets
from glmv.train.trainer import Trainer

EXAMPLE = Path(__file__).parents[3] / "examples" / "pictures" / "train.yaml"
TOKENIZER = "data.dataset_param.preprocess_parameters.model_name_or_path"


def copied(source, target):
    """The directory without its weights."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copyfile(path, target / path.name)
    return target


@pytest.fixture
def named(tiny_dir, tmp_path):
    """The Hugging Face directory that the run names, to be changed by the test."""
    return copied(tiny_dir, tmp_path / "named")


@pytest.fixture
def check(tiny_dir, named, tmp_path):
    """`check()`: compare the named directory with a checkpoint that carries the tiny model's files."""
    (tmp_path / "release").mkdir()
    copied(tiny_dir, tmp_path / "release" / "hf_assets")
    config = load_config(EXAMPLE, [f"{TOKENIZER}={named}", f"model.model_name_or_path={named}"])
    return lambda: refuse_other_assets(config, tmp_path / "release")


def change(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_the_same_files_are_in_order(check):
    check()


def test_files_that_transformers_wrote_anew_are_the_same(check, named):
    AutoTokenizer.from_pretrained(named).save_pretrained(named)
    Glm4vImageProcessorPil.from_pretrained(named).save_pretrained(named)
    Glm4vMoeConfig.from_pretrained(named).save_pretrained(named)
    check()


def test_padding_left_in_a_tokenizer_is_no_difference(check, named):
    content = json.loads((named / "tokenizer.json").read_text(encoding="utf-8"))
    truncation = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    (named / "tokenizer.json").write_text(json.dumps(content | {"truncation": truncation}), encoding="utf-8")
    check()


CHANGES = {
    "chat template": ("chat_template.jinja", "<|assistant|>", "<|assistant|>\n"),
    "image processor": ("preprocessor_config.json", "0.48145466", "0.5"),
    "config.json": ("config.json", '"rope_theta": 10000.0', '"rope_theta": 5000.0'),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_difference_is_refused_by_key_place_and_name(check, named, tmp_path, what):
    file, old, new = CHANGES[what]
    change(named / file, old, new)
    with pytest.raises(AssetsError) as caught:
        check()
    key = "model.model_name_or_path" if what == "config.json" else TOKENIZER
    carried = tmp_path / "release" / "hf_assets"
    assert str(caught.value).startswith(f"{key} = '{named}': its {what} is not that of {carried}, which an export ")


def test_another_vocabulary_is_refused(check, named):
    content = json.loads((named / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    first, second = [token for token, index in vocabulary.items() if index in (100, 101)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (named / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(AssetsError, match="its tokenizer is not that of"):
        check()


def test_a_training_refuses_before_it_reads_data(tiny_dir, named, tmp_path):
    file, old, new = CHANGES["chat template"]
    change(named / file, old, new)
    hf_to_dcp(tiny_dir, tmp_path / "dcp")
    places = [f"training.load={tmp_path}/dcp", f"model.model_name_or_path={tmp_path}/dcp", f"{TOKENIZER}={named}"]
    config = load_config(EXAMPLE, [*places, "data.dataset_param.basic_parameters.dataset=none.json"])
    with process_group("cpu"), pytest.raises(AgreedError, match="its chat template is not that of"):
        Trainer(config)

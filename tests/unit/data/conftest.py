"""Small data sets, written for one test each."""

import json

import pytest
from PIL import Image
from transformers import AutoTokenizer

from glmv.config.data import DataConfig
from glmv.data import load_samples
from glmv.data.dataset import read_conversations
from glmv.data.template import ChatTemplate

LOADER = {
    "pin_memory": False,
    "shuffle": True,
    "dataloader_mode": "sampler",
    "drop_last": True,
    "sampler_type": "BaseRandomBatchSampler",
}
NAMES = {"images": "images", "messages": "messages", "role_tag": "role", "content_tag": "content"}
TAGS = {"user_tag": "user", "assistant_tag": "assistant"}


@pytest.fixture(scope="session")
def tokenizer(tiny_dir):
    return AutoTokenizer.from_pretrained(tiny_dir)


@pytest.fixture(scope="session")
def template(tiny_dir):
    return ChatTemplate(tiny_dir)


@pytest.fixture
def talk():
    """`talk(user, assistant, ..., images=[...])`: one record; a leading `system=` turn where given."""

    def record(*texts, images=(), system=None):
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return {"messages": messages, "images": list(images)} if images else {"messages": messages}

    return record


@pytest.fixture
def data_config(tmp_path, tiny_dir):
    """`data_config(content, **basic)`: writes the data file and gives the config's `data` section for it."""

    def write(content, name="d.json", attr=None, pixels=None, **basic):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return DataConfig.model_validate(
            {
                "dataset_param": {
                    "dataset_type": "huggingface",
                    "attr": NAMES | TAGS if attr is None else attr,
                    "preprocess_parameters": {"model_name_or_path": str(tiny_dir)} | (pixels or {}),
                    "basic_parameters": {"dataset": str(path), "dataset_dir": str(tmp_path)} | basic,
                },
                "dataloader_param": LOADER,
            }
        )

    return write


@pytest.fixture
def read(data_config):
    """`read(content, ...)`: the conversations of a data file."""
    return lambda content, **options: read_conversations(data_config(content, **options).dataset_param)


@pytest.fixture
def load(data_config, tiny_dir):
    """`load(content, ...)`: the samples of a data file."""
    return lambda content, **options: load_samples(data_config(content, **options), tiny_dir)


@pytest.fixture
def picture(tmp_path):
    """`picture(name, size)`: a picture file with a gradient, so that no two places are alike."""

    def save(name="p.png", size=(112, 84)):
        image = Image.merge("RGB", [Image.linear_gradient("L").resize(size).rotate(90 * k) for k in range(3)])
        image.save(tmp_path / name)
        return name

    return save

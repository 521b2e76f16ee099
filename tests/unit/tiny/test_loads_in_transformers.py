"""transformers opens the tiny directory offline, as it opens a published one."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.processing_utils import ProcessorMixin

from glmv.tiny.tokenizer import SPECIAL_TOKENS, TEXT_TOKENS


class PictureProcessor(Glm4vProcessor):
    """Glm4vProcessor without its video half, which needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        self.image_token = "<|image|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids("<|image|>")
        self.video_token = "<|video|>"
        self.video_token_id = tokenizer.convert_tokens_to_ids("<|video|>")
        self.video_start_id = tokenizer.convert_tokens_to_ids("<|begin_of_video|>")
        self.video_end_id = tokenizer.convert_tokens_to_ids("<|end_of_video|>")
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


@pytest.fixture(scope="module")
def tokenizer(tiny_dir):
    return AutoTokenizer.from_pretrained(tiny_dir)


def test_config_has_the_hub_fields(tiny_dir, tokenizer):
    config = AutoConfig.from_pretrained(tiny_dir)
    assert config.text_config.rope_parameters["mrope_section"] == [2, 3, 3]
    assert config.text_config.head_dim == 32
    assert config.image_token_id == tokenizer.convert_tokens_to_ids("<|image|>")
    assert config.text_config.pad_token_id == tokenizer.pad_token_id


def test_model_loads_without_missing_or_unexpected_keys(tiny_dir):
    model, info = AutoModelForImageTextToText.from_pretrained(tiny_dir, output_loading_info=True)
    assert {name: list(found) for name, found in info.items() if found} == {}
    assert model.lm_head.weight.dtype == torch.bfloat16
    bias = model.model.language_model.layers[1].mlp.gate.e_score_correction_bias
    assert bias.dtype == torch.float32
    assert not torch.equal(bias, bias.bfloat16().float())


@pytest.mark.parametrize("token", SPECIAL_TOKENS + TEXT_TOKENS)
def test_a_special_token_is_one_id(token, tokenizer):
    assert tokenizer.decode(tokenizer.encode(token)) == token
    assert len(tokenizer.encode(token)) == 1


@pytest.mark.parametrize("text", ["Zebra №5, 4.7 km\n\n  end", "一只猫坐在窗户上", "🦓", ""])
def test_any_text_survives_the_tokenizer(text, tokenizer):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_skipping_special_tokens_leaves_thoughts_readable(tokenizer):
    ids = tokenizer.encode("<|user|>\nWhy?/nothink<|assistant|>\n<think>so</think>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "\nWhy?/nothink\n<think>so</think>"


def test_chat_template_writes_the_glm_form(tokenizer):
    picture_turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
    messages = [{"role": "system", "content": "S"}, picture_turn, {"role": "assistant", "content": "A dog."}]
    text = tokenizer.apply_chat_template([*messages, {"role": "user", "content": "Sure?"}], tokenize=False)
    assert text == (
        "[gMASK]<sop><|system|>\nS<|user|>\n<|begin_of_image|><|image|><|end_of_image|>What?"
        "<|assistant|>\nA dog.<|user|>\nSure?"
    )


@pytest.mark.parametrize(
    ("options", "end"),
    [({}, "Hi<|assistant|>\n"), ({"enable_thinking": False}, "Hi/nothink<|assistant|>\n<think></think>\n")],
)
def test_generation_prompt(options, end, tokenizer):
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    assert text == f"[gMASK]<sop><|user|>\n{end}"


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_processor_expands_a_picture(tiny_dir, tokenizer):
    template = (tiny_dir / "chat_template.jinja").read_text()
    processor = PictureProcessor(AutoImageProcessor.from_pretrained(tiny_dir), tokenizer, chat_template=template)
    picture = Image.fromarray(np.arange(80 * 120 * 3, dtype=np.uint8).reshape(80, 120, 3))
    turn = {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "What?"}]}
    inputs = processor.apply_chat_template([turn], tokenize=True, return_dict=True, return_tensors="pt")
    assert inputs["image_grid_thw"].tolist() == [[1, 6, 8]]
    assert inputs["pixel_values"].shape == (48, 1176)
    assert int((inputs["input_ids"] == processor.image_token_id).sum()) == 12
    assert int(inputs["mm_token_type_ids"].sum()) == 12

"""transformers' own processor gives the same ids, token types, grids and pixels."""

import json

import pytest
import torch
from PIL import Image
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.processing_utils import ProcessorMixin

from glmv.data import DataError, load_samples


class ImageProcessorOnly(Glm4vProcessor):
    """Glm4vProcessor without its video half, which would need torchvision."""

    @classmethod
    def get_attributes(cls):
        return ["image_processor", "tokenizer"]

    def __init__(self, image_processor, tokenizer, chat_template=None):
        self.image_token, self.video_token = "<|image|>", "<|video|>"
        ids = tokenizer.convert_tokens_to_ids
        self.image_token_id, self.video_token_id = ids(self.image_token), ids(self.video_token)
        self.video_start_id, self.video_end_id = ids("<|begin_of_video|>"), ids("<|end_of_video|>")
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


@pytest.fixture(scope="module")
def processor(tiny_dir, tokenizer):
    return ImageProcessorOnly(
        Glm4vImageProcessorPil.from_pretrained(tiny_dir), tokenizer, chat_template=tokenizer.chat_template
    )


def as_parts(messages, images):
    """A record in the form of transformers' chat API: texts and pictures as a list of parts."""
    images = iter(images)
    parts = []
    for message in messages:
        content = []
        for number, text in enumerate(message["content"].split("<image>")):
            if number:
                content.append({"type": "image", "image": next(images)})
            if text:
                content.append({"type": "text", "text": text})
        parts.append({"role": message["role"], "content": content})
    return parts


CASES = {
    "text": (["Hi", "yes"], []),
    "picture": (["<image>\nWhat is it?", "A gradient."], [(112, 84)]),
    "odd_size": (["<image>What?", "yes"], [(131, 97)]),
    "two_pictures": (["<image> and <image>?", "yes", "why?", "because"], [(112, 84), (84, 140)]),
    "later_picture": (["Hi", "yes", "and <image>?", "no"], [(168, 84)]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_sample_is_what_the_processor_makes_of_it(processor, load, talk, picture, tmp_path, tokenizer, case):
    texts, sizes = CASES[case]
    names = [picture(f"p{i}.png", size) for i, size in enumerate(sizes)]
    record = talk(*texts, images=names)
    expected = processor.apply_chat_template(
        as_parts(record["messages"], [Image.open(tmp_path / name) for name in names]),
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    (sample,) = load([record])
    assert sample.input_ids[:-1].equal(expected["input_ids"][0])
    assert sample.input_ids[-1] == tokenizer.convert_tokens_to_ids("<|user|>")
    assert sample.mm_token_type_ids[:-1].equal(torch.as_tensor(expected["mm_token_type_ids"])[0])
    if names:
        assert sample.pixel_values.dtype == torch.float32
        assert sample.pixel_values.equal(expected["pixel_values"])
        assert sample.image_grid_thw.equal(expected["image_grid_thw"])
    else:
        assert sample.pixel_values is sample.image_grid_thw is None


def test_the_pixel_budget_bounds_the_tokens(load, talk, picture):
    record = talk("<image>", "yes", images=[picture("p.png", (560, 420))])
    (sample,) = load([record], pixels={"image_max_pixels": 28 * 28 * 24})
    assert sample.image_grid_thw.tolist() == [[1, 8, 12]]
    assert int(sample.mm_token_type_ids.sum()) == 24


def test_a_broken_picture_is_told_with_its_sample(load, talk, picture, tmp_path):
    record = talk("<image>", "yes", images=[picture()])
    (tmp_path / "p.png").write_bytes((tmp_path / "p.png").read_bytes()[:200])
    with pytest.raises(DataError) as caught:
        load([talk("q", "yes"), record])
    assert str(caught.value).startswith(f"d.json[1]: {tmp_path}/p.png: cannot be read as a picture (")


def test_a_directory_without_image_processor_is_told(data_config, tiny_dir, tmp_path, talk, picture):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (bare / name).write_bytes((tiny_dir / name).read_bytes())
    (bare / "config.json").write_text(json.dumps({"model_type": "glm4v_moe"}))
    config = data_config([talk("<image>", "yes", images=[picture()])])
    with pytest.raises(DataError, match=r"bare: has no preprocessor_config.json"):
        load_samples(config, bare)

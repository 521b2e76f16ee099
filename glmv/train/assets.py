"""The tokenizer, chat template, image processor and config.json that a run names, against the checkpoint's own.

A run reads them where its config says; an export hands on those of the checkpoint's `hf_assets`. Were they different,
the exported model would be served with other tokens, prompts, pixels or settings than it was trained with. What counts
is what the files mean: transformers may have written one of them anew.
"""

import json
from pathlib import Path
from typing import Any

from glmv.checkpoint.paths import ASSETS
from glmv.config import Config
from glmv.data.template import ChatTemplate
from glmv.errors import GlmvError
from glmv.model import ModelConfig
from glmv.train.build import read_model_config

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
PROCESSOR_FILE = "preprocessor_config.json"
# How many tokens a text may have is the run's affair (`cutoff_len`), and names of classes change with transformers.
NOT_OF_THE_TOKENIZER = ("truncation", "padding")
NOT_OF_THE_PROCESSOR = ("image_processor_type", "processor_class")


class AssetsError(GlmvError):
    """The run would not train what the checkpoint will be exported with."""


def refuse_other_assets(config: Config, directory: Path) -> None:
    """Compare what the config names with what the checkpoint carries.

    Args:
        directory: one iteration of a training checkpoint.
    Raises:
        AssetsError: they differ; key, both places and what differs.
    """
    carried = directory / ASSETS
    named = Path(config.data.dataset_param.preprocess_parameters.model_name_or_path)
    if differing := different_processing(named, carried):
        key = "data.dataset_param.preprocess_parameters.model_name_or_path"
        raise AssetsError(_message(key, named, carried, " and ".join(differing)))
    if read_model_config(config) != ModelConfig.from_hf_dir(carried):
        raise AssetsError(
            _message("model.model_name_or_path", Path(config.model.model_name_or_path), carried, "config.json")
        )


def different_processing(named: Path, carried: Path) -> list[str]:
    """Which of tokenizer, chat template and image processor are not the same in two Hugging Face directories."""
    found = []
    if not _same_bytes(named, carried, TOKENIZER_FILES):
        first, second = ChatTemplate(named).tokenizer, ChatTemplate(carried).tokenizer
        if _pipeline(first) != _pipeline(second) or first.pad_token_id != second.pad_token_id:
            found.append("tokenizer")
        if first.chat_template != second.chat_template:
            found.append("chat template")
    if not _same_bytes(named, carried, (PROCESSOR_FILE,)) and _processor(named) != _processor(carried):
        found.append("image processor")
    return found


def _same_bytes(named: Path, carried: Path, names: tuple[str, ...]) -> bool:
    return all(_read(named / name) == _read(carried / name) for name in names)


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _pipeline(tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401 - transformers' tokenizers have no common typed base
    """What makes tokens of a text: normaliser, splitting, vocabulary, added tokens."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    return {key: value for key, value in content.items() if key not in NOT_OF_THE_TOKENIZER}


def _processor(directory: Path) -> dict[str, Any] | None:
    """Settings of the image processor, defaults included; None where a directory for texts alone has none."""
    if not (directory / PROCESSOR_FILE).is_file():
        return None
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    settings = Glm4vImageProcessorPil.from_pretrained(directory).to_dict()
    return {key: value for key, value in settings.items() if key not in NOT_OF_THE_PROCESSOR}


def _message(key: str, named: Path, carried: Path, what: str) -> str:
    return (
        f"{key} = {str(named)!r}: its {what} is not that of {carried}, which an export of this training will carry.\n"
        f"Name {carried} there; or, if the other files are the right ones, convert their directory to a checkpoint."
    )

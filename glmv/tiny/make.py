"""`make_tiny`: write the tiny model's directory, the same bytes for the same arguments."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from safetensors.torch import save
from tokenizers import Tokenizer

from glmv.checkpoint.hub_names import HubTensor, hub_tensors
from glmv.errors import GlmvError
from glmv.model.config import ModelConfig
from glmv.tiny import config as tiny_config
from glmv.tiny.tokenizer import special_token_ids, tokenizer_config, train_tokenizer
from glmv.tiny.weights import draw

MAX_SHARD_BYTES = 320_000  # several shards, with one layer's experts across two of them
MARKER = ".make-tiny.json"  # lists the files that a later make-tiny may replace


class TinyError(GlmvError):
    """The directory given to `make-tiny` can't be used."""


def make_tiny(
    directory: str | Path,
    *,
    seed: int = 0,
    config_overrides: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    force: bool = False,
) -> Path:
    """Write a complete Hugging Face directory: config, weights in shards, tokenizer, processors, chat template.

    Args:
        directory: made if it doesn't exist. One that holds other things than an earlier `make_tiny` is refused.
        seed: of the weights; tokenizer and configs don't depend on it.
        config_overrides: fields of config.json to replace, nested as there.
        max_shard_bytes: a shard is closed before it grows beyond this.
        force: write into a directory of other things too, and remove its safetensors files.
    Returns:
        The directory.
    Raises:
        TinyError: it is not empty, or is a file.
    """
    target = Path(directory)
    replaceable = _replaceable(target, force)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        names = _write_all(Path(scratch), seed, config_overrides, max_shard_bytes)
        for name in replaceable:
            (target / name).unlink(missing_ok=True)
        target.mkdir(exist_ok=True)
        for name in names:
            os.replace(Path(scratch) / name, target / name)
    return target


def _replaceable(target: Path, force: bool) -> list[str]:
    """Names in `target` that may be removed before writing."""
    if not target.exists():
        return []
    if not target.is_dir():
        raise TinyError(f"{target}: is a file. Give make-tiny a directory, or a name that doesn't exist yet.")
    present = sorted(path.name for path in target.iterdir())
    marker = target / MARKER
    ours = json.loads(marker.read_text())["files"] if marker.is_file() else []
    foreign = sorted(set(present) - set(ours))
    if foreign and not force:
        raise TinyError(
            f"{target}: holds {len(foreign)} file(s) that make-tiny did not write, {foreign[0]} among them.\n"
            "Choose another directory, or give --force to write into this one and remove its safetensors files."
        )
    return [name for name in present if name in ours or name.endswith(".safetensors")]


def _write_all(directory: Path, seed: int, overrides: Mapping[str, Any] | None, max_shard_bytes: int) -> list[str]:
    tokenizer = train_tokenizer()
    config = tiny_config.hub_config(special_token_ids(tokenizer), overrides)
    architecture = ModelConfig.from_hf(config, source="the tiny model's config.json")
    _write_json(directory / "config.json", config)
    _write_side_files(directory, tokenizer)
    _write_weights(directory, hub_tensors(architecture), seed, max_shard_bytes)
    names = sorted([path.name for path in directory.iterdir()] + [MARKER])
    _write_json(directory / MARKER, {"seed": seed, "files": names})
    return names


def _write_side_files(directory: Path, tokenizer: Tokenizer) -> None:
    ids = special_token_ids(tokenizer)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", tokenizer_config(tokenizer))
    _write_json(directory / "generation_config.json", tiny_config.generation_config(ids))
    _write_json(directory / "preprocessor_config.json", tiny_config.image_processor_config())
    _write_json(directory / "video_preprocessor_config.json", tiny_config.video_processor_config())
    with resources.as_file(resources.files("glmv.tiny") / "chat_template.jinja") as template:
        shutil.copyfile(template, directory / "chat_template.jinja")


def _write_weights(directory: Path, tensors: list[HubTensor], seed: int, max_shard_bytes: int) -> None:
    """Write safetensors shards and their index with the safetensors library."""
    shards: list[dict[str, Any]] = [{}]
    used, total = 0, 0
    for tensor in tensors:
        value = draw(tensor, seed)
        if shards[-1] and used + value.nbytes > max_shard_bytes:
            shards.append({})
            used = 0
        shards[-1][tensor.name] = value
        used += value.nbytes
        total += value.nbytes
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (directory / file_name).write_bytes(save(shard, metadata={"format": "pt"}))
        weight_map.update(dict.fromkeys(shard, file_name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")

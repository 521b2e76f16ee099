"""`load_config`: from a YAML file and overrides to a checked Config."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from glmv.config.errors import ConfigError
from glmv.config.explain import dotted, explain, unknown
from glmv.config.keys import all_keys
from glmv.config.reader import parse, read_yaml
from glmv.config.root import Config


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read, override and check a training config.

    Args:
        path: a YAML file with the sections parallel, data, model, features, training and tools.
        overrides: `section.key=value`, the value read as YAML: `training.lr=1e-5`, `model.freeze=[model.visual]`.
    Raises:
        ConfigError: one message that names every fault by file, key and value, with the way out.
    """
    raw = read_yaml(Path(path))
    written: dict[str, str] = {}
    for override in overrides:
        keys, value = _split(override)
        _put(raw, keys, value, override)
        written[".".join(keys)] = override

    def source(at: list[Any]) -> str:
        for key, override in written.items():
            if f"{dotted(at)}.".startswith(f"{key}."):
                return f"override {override}"
        below = [override for key, override in written.items() if key.startswith(f"{dotted(at)}.")]
        return f"{path} with {' '.join(below)}" if below else str(path)

    try:
        return Config.model_validate(raw)
    except ValidationError as fault:
        raise ConfigError(explain(fault, raw, source)) from fault


def _split(override: str) -> tuple[list[str], Any]:
    """`training.lr=1e-5` -> the keys training and lr, and the number."""
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(
            f"override {override}: not of the form section.key=value.\nWrite for example training.lr=1e-5."
        )
    value = parse(text, f"override {override}")
    if tuple(keys) not in all_keys():
        raise ConfigError(f"override {override}: {unknown(list(keys), value)}")
    return keys, value


def _put(raw: dict[str, Any], keys: list[str], value: object, override: str) -> None:
    node = raw
    for depth, name in enumerate(keys[:-1], start=1):
        inner = node.get(name)
        # A copy, because a section may be an alias that also stands elsewhere in the file.
        node[name] = {} if inner is None else dict(inner) if isinstance(inner, dict) else inner
        node = node[name]
        if not isinstance(node, dict):
            raise ConfigError(
                f"override {override}: {'.'.join(keys[:depth])} is {node!r} in the file, and not a section.\n"
                "Mend the file first."
            )
    node[keys[-1]] = value

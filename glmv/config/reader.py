"""Read one YAML file into plain Python values, without YAML's surprises."""

import re
from pathlib import Path
from typing import Any

import yaml

from glmv.config.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with numbers read as YAML 1.2 reads them."""


# YAML 1.1 takes 1e-5 for a string, because it wants a dot in every float.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Raises:
        ConfigError: no such file, not UTF-8, not YAML, a key written twice, or something other than a mapping.
    """
    if not path.is_file():
        what = "is a directory, not a file" if path.is_dir() else "no such file"
        raise ConfigError(f"{path}: {what}.\nGive the path of a YAML training config.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as fault:
        raise ConfigError(f"{path}: cannot be read ({fault}).\nGive a UTF-8 text file.") from fault
    values = parse(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: holds {_name(values)} where the sections of a training config should be.\n"
            "Write the sections data, model and training, and where needed parallel, features and tools."
        )
    return values


def parse(text: str, source: str) -> object:
    """The value of a YAML text; `source` names it in errors."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_twins(node, source, "", set())
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as fault:
        mark = fault.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(
            f"{source}{where}: not YAML ({fault.problem}).\nCheck indentation, colons and quotes there."
        ) from fault
    except yaml.YAMLError as fault:
        raise ConfigError(f"{source}: not YAML ({fault}).\nSave it as plain UTF-8 text.") from fault


def _refuse_twins(node: yaml.Node, source: str, path: str, seen: set[int]) -> None:
    """Stop at a key that stands twice in one mapping: YAML would quietly keep the last."""
    if id(node) in seen:  # an alias, checked where its anchor stands
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _refuse_twins(item, source, f"{path}[{index}]", seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name = f"{path}.{key.value}".lstrip(".")
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ConfigError(
                    f"{source}: {name} is written twice, in line {lines[key.value]} and in line {line}.\nKeep one."
                )
            if key.value != "<<":
                lines[key.value] = line
            _refuse_twins(value, source, name, seen)


def _name(value: object) -> str:
    if value is None:
        return "nothing"
    return "a list" if isinstance(value, list) else "a single value"

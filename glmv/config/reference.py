"""The reference page of the training config, made from the schema: what it says is what is checked."""

import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from glmv.config.explain import as_yaml
from glmv.config.keys import child
from glmv.config.root import Config
from glmv.config.section import Section
from glmv.config.unbuilt import built_values, without_effect

_PREFACE = """\
# Config reference

Printed by `glmv config-reference` from the schema in `glmv/config/`; do not edit it by hand.

A training config is a YAML file with the six sections below. Sections and keys that have a default may be left out.
Types are strict (`"1"` is no integer), numbers are YAML 1.2 (`1e-5` is one), and a key that is not on this page is
refused. Any key can be given on the command line: `glmv train CONFIG.yaml training.lr=1e-5`.

The column *glmv train* says what it does with a key today: *yes* - every value; *only* - these values, others are
refused by name; *no effect* - accepted because published configs carry it."""
_TYPES = {str: "text", bool: "true or false", int: "integer", float: "number"}
_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def reference() -> str:
    """The page, in Markdown, without a newline at its end."""
    return "\n".join([_PREFACE, *_section(Config, "")])


def _section(section: type[Section], path: str) -> Iterator[str]:
    inner = {name: kind for name in section.model_fields if (kind := child(section, name))}
    plain = [name for name in section.model_fields if name not in inner]
    if path:
        yield f"\n{'###' if '.' in path else '##'} {path}"
        yield from (f"\n{text}" for text in [_about(section, path)] if text)
    if plain:
        yield "\n| key | value | default | glmv train | meaning |\n|---|---|---|---|---|"
    for name in plain:
        yield _row(f"{path}.{name}", name, section.model_fields[name])
    for name, kind in inner.items():
        yield from _section(kind, f"{path}.{name}".lstrip("."))


def _about(section: type[Section], path: str) -> str:
    """The section's docstring, without the path that the heading gives already."""
    text = " ".join((section.__doc__ or "").split()).removeprefix(f"`{path}`").lstrip(":. ")
    return text[:1].upper() + text[1:]


def _row(path: str, name: str, field: FieldInfo) -> str:
    cells = [f"`{name}`", _value(field.annotation, field.metadata), _default(field), _built(path)]
    text = " | ".join([*cells, " ".join((field.description or "").split())])
    return f"| {text} |"


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    return "required" if default is PydanticUndefined else f"`{_yaml(default)}`"


def _built(path: str) -> str:
    if why := without_effect(path):
        return f"no effect: {why}"
    values = built_values(path)
    return "yes" if values is None else "only " + " or ".join(f"`{_yaml(value)}`" for value in values)


def _value(kind: Any, metadata: list[Any]) -> str:  # noqa: ANN401 - any type that a field may have
    """`Annotated[int, Field(ge=1)] | None` -> "integer (at least 1) or `null`"."""
    origin = get_origin(kind)
    if hasattr(kind, "__metadata__"):
        return _value(kind.__origin__, [limit for item in kind.__metadata__ for limit in getattr(item, "metadata", [])])
    if origin in (Union, types.UnionType):
        return " or ".join(_value(part, metadata) for part in get_args(kind))
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if origin is list:
        return f"list of {_value(get_args(kind)[0], metadata)}"
    if kind is type(None):
        return "`null`"
    limits = [
        f"{words} {getattr(item, key):g}" for item in metadata for key, words in _LIMITS.items() if hasattr(item, key)
    ]
    return f"{_TYPES[kind]} ({', '.join(limits)})" if limits else _TYPES[kind]


def _yaml(value: object) -> str:
    return value if isinstance(value, str) and value else as_yaml(value)

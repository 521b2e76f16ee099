"""Turn what the schema found wrong into sentences: what, where, why, and the way out."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from glmv.config.keys import nearest, same_name_elsewhere, section_at

_NAMES = {dict: "a section", list: "a list"}


def explain(fault: ValidationError, raw: Mapping[str, Any], source: Callable[[list[Any]], str]) -> str:
    """One message for all faults of a config, a paragraph of two lines each.

    Args:
        fault: what pydantic found.   raw: the values it judged.
        source: says where the value of a path was written (a file, an override).
    """
    groups: dict[tuple[Any, ...], list[ErrorDetails]] = {}
    for error in fault.errors(include_url=False):
        groups.setdefault(tuple(_real_path(error, raw)), []).append(error)
    meant = {nearest(path) for path, errors in groups.items() if errors[0]["type"] == "extra_forbidden"}
    paragraphs = []
    for path, errors in groups.items():
        # `trainning:` is one mistake, not also a missing `training`.
        if errors[0]["type"] == "missing" and dotted(list(path)) in meant:
            continue
        paragraphs.append(f"{source(list(path))}: {_sentence(list(path), errors, raw)}")
    return "\n".join(paragraphs)


def dotted(path: list[Any]) -> str:
    """`training.plugin[1]` for the path training, plugin, 1."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def as_yaml(value: object) -> str:
    """A value as a user would write it; texts in quotes, so that "3" and 3 look different."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else repr(value)


def unknown(path: list[Any], value: object) -> str:
    """What to say of a key that the schema does not have."""
    homes = same_name_elsewhere(path)
    if homes:
        return f"{_shown(path, value)} is in the wrong section.\nIts place is {' or '.join(homes)}."
    guess = nearest(path)
    if guess:
        return f"{_shown(path, value)} is not a known key.\nDid you mean {guess}?"
    section = section_at(path[:-1])
    known = f"has the keys {', '.join(section.model_fields)}" if section else "holds no keys"
    return f"{_shown(path, value)} is not a known key.\n{dotted(path[:-1]) or 'A config'} {known}."


def _sentence(path: list[Any], errors: list[ErrorDetails], raw: Mapping[str, Any]) -> str:
    error = errors[0]
    if error["type"] == "extra_forbidden":
        return unknown(path, error["input"])
    if error["type"] == "missing":
        return f"{dotted(path)} is missing.\nAdd it: {_description(path)}"
    if error["type"] == "value_error":
        rule = error["msg"].removeprefix("Value error, ")
        if not isinstance(error["input"], dict):
            return f"{_shown(path, error['input'])} {rule}."
        return f"{dotted([*path, rule])}."
    value = _value_at(path, raw)
    wanted = " or ".join(dict.fromkeys(_wanted(error) for error in errors))
    return f"{_shown(path, value)} must be {wanted}.{_near_choice(value, error)}\n{_description(path)}".rstrip()


def _wanted(error: ErrorDetails) -> str:
    if error["type"] in ("model_type", "model_attributes_type"):
        return "a section, that is keys with values below it"
    wanted = error["msg"].removeprefix("Input should be ").replace("a valid integer", "an integer")
    wanted = wanted.replace("a valid boolean", "true or false").replace("a valid ", "a ")
    return wanted.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")


def _near_choice(value: object, error: ErrorDetails) -> str:
    if error["type"] != "literal_error" or not isinstance(value, str):
        return ""
    choices = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
    near = get_close_matches(value, choices, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _shown(path: list[Any], value: object) -> str:
    if isinstance(value, dict | list):
        return f"{dotted(path)} ({_NAMES[type(value)]})"
    return f"{dotted(path)} = {as_yaml(value)}"


def _description(path: list[Any]) -> str:
    names = [part for part in path if isinstance(part, str)]
    section = section_at(names[:-1])
    field = section.model_fields.get(names[-1]) if section and names else None
    return (field.description or "").replace("\n", " ") if field else ""


def _real_path(error: ErrorDetails, raw: Mapping[str, Any]) -> list[Any]:
    """The part of pydantic's location that the user wrote; behind it stand names of union branches."""
    if error["type"] == "missing":
        return list(error["loc"])
    path: list[Any] = []
    node: Any = raw
    for part in error["loc"]:
        inside = part in node if isinstance(node, dict) else isinstance(node, list) and isinstance(part, int)
        if not inside:
            break
        node = node[part]
        path.append(part)
    return path


def _value_at(path: list[Any], raw: Mapping[str, Any]) -> object:
    node: Any = raw
    for part in path:
        node = node[part]
    return node

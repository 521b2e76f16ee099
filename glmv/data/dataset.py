"""Read conversations: JSON or JSON Lines, LLaVA style, with pictures named by path."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from glmv.config.data import AttributeNames, DatasetParam
from glmv.data.errors import DataError
from glmv.data.sample import Dropped

PLACEHOLDER = "<image>"
"""Where a picture stands in a user's text."""

_PIP_NAMES = {"skimage": "scikit-image", "sklearn": "scikit-learn"}
Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Turn:
    """One message."""

    role: Role
    text: str


@dataclass(frozen=True)
class Conversation:
    """A checked record: an optional system turn, then user and assistant in turns, the assistant last."""

    sample_id: str
    turns: tuple[Turn, ...]
    images: tuple[Path, ...]


def read_conversations(param: DatasetParam) -> list[Conversation | Dropped]:
    """All records of the files in `basic_parameters.dataset`, at most `max_samples`.

    A record in which the assistant says nothing (no content, null, blanks) is dropped: it would teach silence.

    Raises:
        DataError: with file and sample index, for a file or a record that is not what `attr` describes.
    """
    basic = param.basic_parameters
    folder = picture_folder(basic.dataset_dir)
    found: list[Conversation | Dropped] = []
    for name in basic.dataset.split(","):
        path = Path(name.strip())
        for index, record in enumerate(read_records(path)):
            if basic.max_samples is not None and len(found) == basic.max_samples:
                return found
            found.append(_conversation(record, f"{path.name}[{index}]", f"{path}, sample {index}", param.attr, folder))
    return found


def picture_folder(dataset_dir: str) -> Path:
    """The directory that picture paths are relative to; `package:NAME/SUB` lies inside a Python package."""
    if not dataset_dir.startswith("package:"):
        return Path(dataset_dir)
    package, _, inside = dataset_dir.removeprefix("package:").partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"data.dataset_param.basic_parameters.dataset_dir = {dataset_dir!r}: "
            f"there is no Python package {package!r} here.\n"
            f"Install it: pip install {_PIP_NAMES.get(package, package)}"
        )
    return Path(spec.submodule_search_locations[0]) / inside


def read_records(path: Path) -> list[Any]:
    """The records of a JSON list, or of JSON Lines under any file name."""
    if not path.is_file():
        raise DataError(f"{path}: no such data file.\nCorrect data.dataset_param.basic_parameters.dataset.")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise DataError(f"{path}: not UTF-8 text ({fault}).\nSave it as UTF-8.") from fault
    if not text.strip():
        raise DataError(f"{path}: is empty.\nWrite a JSON list of samples, or one JSON object a line.")
    records = _json_lines(text, path) if path.suffix == ".jsonl" else _json(text, path)
    if not isinstance(records, list):
        raise DataError(
            f"{path}: holds one JSON {type(records).__name__} where a list of samples should be.\n"
            "Put the samples in [ ], or save one JSON object a line."
        )
    if not records:
        raise DataError(f"{path}: holds an empty list.\nWrite at least one sample.")
    return records


def _json(text: str, path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    try:
        return json.loads(text)
    except json.JSONDecodeError as fault:
        if text.lstrip().startswith("{"):
            return _json_lines(text, path)
        raise DataError(
            f"{path}, line {fault.lineno}, column {fault.colno}: not JSON ({fault.msg}).\nMend the file there."
        ) from fault


def _json_lines(text: str, path: Path) -> list[Any]:
    records = []
    # Not splitlines(): it would also split at U+2028 and others, which may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as fault:
            raise DataError(
                f"{path}, line {number}, column {fault.colno}: not JSON ({fault.msg}).\n"
                "Write one JSON object a line, or one JSON list."
            ) from fault
    return records


def _conversation(
    record: object, sample_id: str, where: str, attr: AttributeNames, folder: Path
) -> Conversation | Dropped:
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: is a JSON {type(record).__name__}, not an object.\nGive it its turns under {attr.messages!r}."
        )
    messages = record.get(attr.messages)
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{where}: has no turns under {attr.messages!r} (its keys: {', '.join(map(str, record)) or 'none'}).\n"
            "Correct the sample, or data.dataset_param.attr.messages."
        )
    turns = tuple(_turn(message, f"{where}, turn {number}", attr) for number, message in enumerate(messages))
    _check_order(turns, where)
    for number, turn in enumerate(turns):
        if turn.role == "assistant" and not turn.text.strip():
            return Dropped(sample_id, f"the assistant says nothing in turn {number}")
    images = tuple(_pictures(record, where, attr, folder))
    _check_placeholders(turns, len(images), where)
    return Conversation(sample_id, turns, images)


def _turn(message: object, where: str, attr: AttributeNames) -> Turn:
    roles: dict[str, Role] = {attr.system_tag: "system", attr.user_tag: "user", attr.assistant_tag: "assistant"}
    if isinstance(message, dict) and message.get(attr.role_tag) == attr.assistant_tag:
        # An answer that is null or missing is an empty one; the sample will be dropped for it.
        message = message | {attr.content_tag: "" if (said := message.get(attr.content_tag)) is None else said}
    if not isinstance(message, dict) or not {attr.role_tag, attr.content_tag} <= message.keys():
        raise DataError(
            f"{where}: is not an object with {attr.role_tag!r} and {attr.content_tag!r}.\n"
            "Correct the sample, or role_tag and content_tag in data.dataset_param.attr."
        )
    role, text = message[attr.role_tag], message[attr.content_tag]
    if not isinstance(role, str) or role not in roles:
        raise DataError(
            f"{where}: {attr.role_tag} = {role!r} is not a known role.\n"
            f"Use {', '.join(roles)}, or correct the tags in data.dataset_param.attr."
        )
    if not isinstance(text, str):
        raise DataError(f"{where}: {attr.content_tag} = {text!r} is not a text.\nWrite a string.")
    return Turn(roles[role], text)


def _check_order(turns: Sequence[Turn], where: str) -> None:
    talk = [turn.role for turn in turns[1:]] if turns[0].role == "system" else [turn.role for turn in turns]
    expected = [("user", "assistant")[number % 2] for number in range(len(talk) + len(talk) % 2)]
    if talk != expected or not talk:
        said = ", ".join(turn.role for turn in turns)
        raise DataError(
            f"{where}: the roles are {said}.\n"
            "After at most one system turn, user and assistant must alternate, the user first and the assistant last."
        )


def _pictures(record: dict[str, Any], where: str, attr: AttributeNames, folder: Path) -> Iterator[Path]:
    named = record.get(attr.images) if attr.images else None
    named = [named] if isinstance(named, str) else named or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise DataError(f"{where}: {attr.images} = {named!r} is not a list of paths.\nWrite a list of strings.")
    for name in named:
        path = folder / name
        if not path.is_file():
            raise DataError(
                f"{where}: there is no picture {path.absolute()}.\n"
                "Correct the sample, or data.dataset_param.basic_parameters.dataset_dir."
            )
        yield path


def _check_placeholders(turns: Sequence[Turn], images: int, where: str) -> None:
    for number, turn in enumerate(turns):
        if "<video>" in turn.text:
            raise DataError(
                f"{where}, turn {number}: holds <video>, and video samples are not built yet.\nTake it out."
            )
        if turn.role != "user" and PLACEHOLDER in turn.text:
            raise DataError(
                f"{where}, turn {number}: the {turn.role} holds {PLACEHOLDER}, which stands for a picture.\n"
                "Only user turns show pictures; write the word otherwise."
            )
    places = sum(turn.text.count(PLACEHOLDER) for turn in turns)
    if places != images:
        raise DataError(
            f"{where}: has {places} {PLACEHOLDER} placeholders and {images} pictures.\n"
            "Every picture needs one placeholder in a user turn."
        )

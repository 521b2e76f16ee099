"""Every key that a training config may have, and the one a user probably meant."""

from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import cache

from glmv.config.root import Config
from glmv.config.section import Section

# Below this likeness two names are strangers: "lr" and "load" 0.33, "seeed" and "seed" 0.89.
_ALIKE = 0.7
# A twin in the same section is the better guess than an equally near name elsewhere.
_SAME_SECTION = 0.2


def child(section: type[Section], name: object) -> type[Section] | None:
    """The sub-section that a key of a section holds; None for plain values and unknown keys."""
    field = section.model_fields.get(name) if isinstance(name, str) else None
    kind = field.annotation if field else None
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def section_at(path: Sequence[str]) -> type[Section] | None:
    """The section that stands at a path of keys."""
    section: type[Section] | None = Config
    for name in path:
        section = child(section, name) if section else None
    return section


@cache
def all_keys() -> tuple[tuple[str, ...], ...]:
    """Paths of all keys, sections included, in the order of the schema."""

    def walk(section: type[Section], path: tuple[str, ...]) -> list[tuple[str, ...]]:
        found = []
        for name in section.model_fields:
            found.append((*path, name))
            inner = child(section, name)
            if inner:
                found += walk(inner, (*path, name))
        return found

    return tuple(walk(Config, ()))


def same_name_elsewhere(path: Sequence[str]) -> list[str]:
    """Keys of other sections with exactly this name: the key stands in the wrong place."""
    return [".".join(key) for key in all_keys() if key[-1] == path[-1]]


def nearest(path: Sequence[str]) -> str | None:
    """The known key that an unknown one resembles most, across all sections."""

    def likeness(key: tuple[str, ...]) -> float:
        alike = SequenceMatcher(None, key[-1].lower(), path[-1].lower()).ratio()
        return alike + (_SAME_SECTION if key[:-1] == tuple(path[:-1]) else 0) if alike >= _ALIKE else 0

    best = max(all_keys(), key=likeness)
    return ".".join(best) if likeness(best) > 0 else None

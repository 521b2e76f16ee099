"""The pattern language of the YAML plans: which modules a plan speaks about.

A pattern covers a whole module name. `{*}` stands for one integer, `{a-b}` for an integer of that inclusive range, `*`
for any characters (dots too) and `?` for one character. Source: `mindspeed.fsdp.utils.str_match`; unlike there, a
pattern of a list that matches nothing is an error: a plan with a typo would otherwise train without what it asked for.
"""

import difflib
import re
from collections.abc import Iterable, Sequence

from torch import nn

from glmv.errors import GlmvError

TOKEN = re.compile(r"\{([^{}]*)\}|[*?{}]|[^*?{}]+")
RANGE = re.compile(r"(\d+)-(\d+)")


class PatternError(GlmvError):
    """A module pattern that cannot be read, or that names no module."""


class Pattern:
    """One compiled pattern; `matches(name)` says whether it covers the whole of a module name."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.bounds: list[tuple[int, int] | None] = []
        self.regex = re.compile("".join(self._translate(token) for token in TOKEN.finditer(text)), re.DOTALL)

    def matches(self, name: str) -> bool:
        """True if `name` is covered from its first to its last character."""
        found = self.regex.fullmatch(name)
        if found is None:
            return False
        numbers = (int(digits) for digits in found.groups())
        return all(bound is None or bound[0] <= number <= bound[1] for number, bound in zip(numbers, self.bounds))

    def _translate(self, token: re.Match[str]) -> str:
        if token[0] == "*":
            return ".*"
        if token[0] == "?":
            return "."
        if token[0] in "{}":
            raise PatternError(f'pattern "{self.text}": a "{token[0]}" without its partner.')
        if token[1] is None:
            return re.escape(token[0])
        self.bounds.append(self._bound(token[1]))
        return r"(\d+)"

    def _bound(self, inner: str) -> tuple[int, int] | None:
        if inner == "*":
            return None
        limits = RANGE.fullmatch(inner)
        if limits is None:
            raise PatternError(
                f'pattern "{self.text}": {{{inner}}} is not understood. '
                "Use {*} for any integer or {a-b} for a range; write one pattern per range."
            )
        low, high = int(limits[1]), int(limits[2])
        if low > high:
            raise PatternError(f'pattern "{self.text}": the range {{{inner}}} is empty: {low} > {high}.')
        return low, high


def match_any(name: str, patterns: Iterable[str]) -> bool:
    """True if one of `patterns` covers `name`."""
    return any(Pattern(text).matches(name) for text in patterns)


def select(names: Sequence[str], patterns: Sequence[str], *, key: str, kind: str = "module") -> list[str]:
    """The names that at least one pattern covers, in the order of `names`.

    Args:
        names: every name that exists.   patterns: the list from the YAML.
        key: where the list stands ("parallel.fsdp_plan.apply_modules"), for the message.   kind: what the names name.
    Raises:
        PatternError: a pattern cannot be read or covers no name; the message gives pattern, key and the nearest names.
    """
    chosen: set[str] = set()
    for text in patterns:
        try:
            pattern = Pattern(text)
        except PatternError as error:
            raise PatternError(f"{key}: {error}") from None
        matched = [name for name in names if pattern.matches(name)]
        if not matched:
            raise PatternError(_no_match(text, names, key, kind))
        chosen.update(matched)
    return [name for name in names if name in chosen]


def select_modules(model: nn.Module, patterns: Sequence[str], *, key: str) -> dict[str, nn.Module]:
    """The modules of `model` that `patterns` cover, by name, parents before children; raises as `select` does."""
    modules = {name: module for name, module in model.named_modules() if name}
    return {name: modules[name] for name in select(list(modules), patterns, key=key)}


def _no_match(text: str, names: Sequence[str], key: str, kind: str) -> str:
    plain = re.sub(r"\{[^{}]*\}", "0", text).replace("*", "").replace("?", "")
    near = difflib.get_close_matches(plain, names, n=3, cutoff=0.0)
    return f'{key}: the pattern "{text}" matches no {kind}. The nearest names are: {", ".join(near) or "(none)"}.'

"""What goes from a session to its ranks and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def received(data: dict[str, Any]) -> pytest.TestReport:
    """A report that came as JSON, which has no tuples."""
    if isinstance(data["longrepr"], list):
        data["longrepr"] = tuple(data["longrepr"])
    data["user_properties"] = [tuple(pair) for pair in data["user_properties"]]
    return pytest.TestReport._from_json(data)


def rank_options(config: pytest.Config, basetemp: Path) -> dict[str, Any]:
    """The options of this session for its ranks: what selects, prints or distributes tests stays here."""
    mine: dict[str, Any] = {
        key: value
        for key, value in vars(config.option).items()
        if isinstance(value, str | int | float | bool | None)
        or (isinstance(value, list) and all(isinstance(element, str) for element in value))
    }
    quiet: dict[str, Any] = {
        "keyword": "", "markexpr": "", "deselect": None, "maxfail": 0, "lf": False, "failedfirst": False,
        "stepwise": False, "xmlpath": None, "numprocesses": None, "dist": "no", "tx": [], "usepdb": False,
        "capture": "no", "collectonly": False, "durations": None, "setupshow": False, "setuponly": False,
        "setupplan": False,
    }  # fmt: skip
    plugins = [*mine.get("plugins", []), "no:terminal", "no:cacheprovider", "no:xdist", "no:junitxml"]
    where = {"rootdir": str(config.rootpath), "basetemp": str(basetemp), "plugins": plugins}
    return mine | quiet | where | ({"inifilename": str(config.inipath)} if config.inipath else {})

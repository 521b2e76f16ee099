"""torch_npu and CANN, which it needs to be imported."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from glmv import npu_package
from glmv.doctor.fact import Fact, State

PART = "ascend"
VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")  # what CANN's set_env.sh exports
PLACES = tuple(Path("/usr/local/Ascend") / place for place in ("cann", "ascend-toolkit/latest"))
VERSION_FILES = ("version.cfg", "version.info", "*/ascend_toolkit_install.info", "*/ascend_cann_install.info")
DRIVER = Path("/usr/local/Ascend/driver/version.info")


def torch_npu() -> Iterator[Fact]:
    """Whether it is installed, and whether it can be imported: a process of its own tries, which it may take down."""
    try:
        version = metadata.version("torch_npu")
    except metadata.PackageNotFoundError:
        yield Fact(PART, "torch_npu", "not installed", State.absent, "pip install torch_npu, where there is an NPU")
        return
    found = npu_package.probe()
    if found.reason is None:
        yield Fact(PART, "torch_npu", version)
        return
    yield Fact(PART, "torch_npu", version, State.broken, found.reason)
    yield autoload_fact(npu_package.autoload_before)


def cann() -> Iterator[Fact]:
    """The vendor's libraries, and the driver."""
    yield cann_fact(os.environ, PLACES)
    if DRIVER.exists():
        yield Fact(PART, "NPU driver", version_in(DRIVER) or "version unknown", note=str(DRIVER))


def autoload_fact(value: str | None) -> Fact:
    """glmv turns torch's autoload off for itself, but torchrun and other programs import torch without it."""
    if value == "0":
        return Fact(PART, npu_package.AUTOLOAD, "0")
    note = f"export {npu_package.AUTOLOAD}=0 before torchrun: else torch imports torch_npu there, and dies"
    return Fact(PART, npu_package.AUTOLOAD, "not 0", State.broken, note)


def cann_fact(environ: Mapping[str, str], places: tuple[Path, ...]) -> Fact:
    """CANN as the environment names it; else whether it lies somewhere and was not sourced."""
    for variable in VARIABLES:
        if home := environ.get(variable):
            if not Path(home).is_dir():
                return Fact(PART, "CANN", "missing", State.broken, f"{variable} = {home} is no directory")
            return Fact(PART, "CANN", cann_version(Path(home)), note=f"{variable} = {home}")
    for place in places:
        if place.is_dir():
            note = f"it lies in {place}, but its set_env.sh is not sourced"
            return Fact(PART, "CANN", cann_version(place), State.broken, note)
    return Fact(PART, "CANN", "not found", State.absent, f"{' and '.join(VARIABLES)} are not set")


def cann_version(home: Path) -> str:
    """The first version that CANN's own files tell."""
    files = (path for pattern in VERSION_FILES for path in sorted(home.glob(pattern)))
    return next((version for path in files if (version := version_in(path))), "version unknown")


def version_in(path: Path) -> str | None:
    """The value of the first `...version = ...` line of a file; brackets of version.cfg are taken off."""
    text = path.read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^\w*version\s*[=:]\s*(.+)$", text, re.MULTILINE | re.IGNORECASE)
    return None if found is None else found[1].strip().strip("[]").split(":")[-1]

"""Python, torch, transformers, and the compiler."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module, metadata

from glmv.doctor.fact import Fact, State

PART = "software"
TORCH = "2.13"  # the release that torch_npu 2.13 is built for


def python() -> Iterator[Fact]:
    """The interpreter."""
    good = sys.version_info >= (3, 11)
    note = sys.executable if good else "glmv needs Python 3.11 or newer"
    yield Fact(PART, "python", platform.python_version(), State.good if good else State.fatal, note)


def torch() -> Iterator[Fact]:
    """The framework, imported."""
    fact = _imported("torch")
    if fact.state is State.good and not fact.value.startswith(f"{TORCH}."):
        fact = Fact(PART, "torch", fact.value, State.broken, f"glmv is made for {TORCH}")
    yield fact


def transformers() -> Iterator[Fact]:
    """Tokenizer, image processor and the law's witness."""
    yield _imported("transformers", "transformers.models.glm4v_moe")


def compiler() -> Iterator[Fact]:
    """What builds the emulated device, and what builds the vendor stand-ins."""
    chosen = os.environ.get("CXX", "g++")
    path = shutil.which(chosen)
    if path is None:
        yield Fact(PART, "C++ compiler", f"no {chosen}", State.absent, "apt install g++, for the emulated npu")
    else:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=20)
        yield Fact(PART, "C++ compiler", (said.stdout.splitlines() or ["says nothing"])[0], note=path)
    missing = [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]
    if missing:
        note = "apt install gcc binutils, for `make conformance`"
        yield Fact(PART, "C compiler, binutils", f"no {', '.join(missing)}", State.absent, note)
    else:
        yield Fact(PART, "C compiler, binutils", "gcc, nm, readelf")


def _imported(package: str, module: str | None = None) -> Fact:
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return Fact(PART, package, "not installed", State.fatal, f"pip install {package}")
    try:
        import_module(module or package)
    except Exception as error:  # any failure of a package on start-up is a finding
        return Fact(PART, package, version, State.fatal, f"cannot be imported: {error}")
    return Fact(PART, package, version)

"""Compile the C++ extension once for each state of its sources and each PyTorch, and load it.

The result lies in a cache directory whose name holds a hash of both. Ranks that start together wait for one build.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

import torch

from glmv.verify.emulated_npu.errors import EmulationError

SOURCES = Path(__file__).parent / "csrc"
NAME = "_emulated_npu"
FLAGS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-w", f"-DTORCH_EXTENSION_NAME={NAME}")
LIBRARIES = ("-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10")
WAY_OUT = "Install g++ (Debian, Ubuntu: apt install g++), or run on a real NPU."


def load() -> ModuleType:
    """The extension module, built first if need be.

    Raises:
        EmulationError: there is no compiler, or it failed.
    """
    library = cached_library()
    loader = ExtensionFileLoader(NAME, str(library))
    spec = importlib.util.spec_from_file_location(NAME, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def cached_library() -> Path:
    """Where the built extension lies; builds it under a lock if it is not there."""
    directory = cache_directory()
    library = directory / f"{NAME}.so"
    if library.exists():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():  # another rank may have built it meanwhile
            build(library)
    return library


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/glmv/emulated-npu-HASH, by default under ~/.cache."""
    state = hashlib.sha256(f"{torch.__version__} {sys.version} {FLAGS}".encode())
    for source in sorted(SOURCES.iterdir()):
        state.update(source.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "glmv" / f"emulated-npu-{state.hexdigest()[:16]}"


def build(library: Path) -> None:
    """Compile into `library`, which appears whole or not at all."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise EmulationError(f"The emulated npu needs a C++ compiler, and there is no g++ on PATH. {WAY_OUT}")
    print("glmv: building the emulated npu (once, under a minute) ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    unfinished = library.with_suffix(f".{os.getpid()}.so")
    run = subprocess.run(command(compiler, unfinished), capture_output=True, text=True, check=False)
    if run.returncode != 0:
        unfinished.unlink(missing_ok=True)
        raise EmulationError(failure(compiler, run.stderr))
    unfinished.rename(library)
    print(f"glmv: built in {time.monotonic() - start:.0f} s: {library}", file=sys.stderr, flush=True)


def command(compiler: str, output: Path) -> list[str]:
    """The compiler's command line."""
    home = Path(torch.__file__).parent
    headers = [home / "include", home / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    includes = [part for header in headers for part in ("-isystem", str(header))]
    linking = [f"-L{home / 'lib'}", *LIBRARIES, "-o", str(output)]
    return [compiler, *FLAGS, *includes, str(SOURCES / "module.cpp"), *linking]


def failure(compiler: str, output: str) -> str:
    """The compiler's first error lines, and what to do."""
    lines = [line for line in output.splitlines() if "error" in line] or output.splitlines()
    told = "\n".join(f"  {line}" for line in lines[:5])
    if "Python.h" in output:
        way_out = "Install the headers of this Python (Debian, Ubuntu: apt install python3-dev)."
    else:
        way_out = f"The emulated npu is built against torch {torch.__version__}; {compiler} must know C++20."
    return f"The emulated npu does not compile:\n{told}\n{way_out}"

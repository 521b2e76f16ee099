"""Builds stand-ins for the vendor's libraries, so that the wheel can be imported where the vendor's are not installed.

`vendor/runtime.c` is a runtime on host memory. Whatever else the wheel's binaries ask for is answered by a generated
function that returns 0. All of it stands in one library; the other names that the wheel loads are empty and lead there.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

from glmv.errors import GlmvError
from glmv.verify.wheel.once import made_once

RUNTIME = Path(__file__).with_name("vendor") / "runtime.c"
MAIN_LIBRARY = "libascendcl.so"
TOOLS = ("gcc", "nm", "readelf")


class StandInError(GlmvError):
    """The stand-ins cannot be built here."""


def missing_tools() -> list[str]:
    """Programs that `build` needs and that are not on PATH."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def build(site: Path) -> list[Path]:
    """Stand-in libraries for the wheel in `site`, in the order to load them; built once, beside the wheel.

    Raises:
        StandInError: gcc or binutils is missing, or gcc refuses the source.
    """
    if missing := missing_tools():
        raise StandInError(f"{', '.join(missing)} not found: install gcc and binutils to build the vendor stand-ins.")
    source = RUNTIME.read_bytes() + Path(__file__).read_bytes()
    built = site.with_name(f"{site.name}-vendor-{hashlib.sha256(source).hexdigest()[:12]}")
    if not built.is_dir():
        with made_once(built) as unfinished:
            _build(site, unfinished)
    return sorted(built.glob("lib*.so"), key=lambda path: (path.name != MAIN_LIBRARY, path.name))


def _build(site: Path, out: Path) -> None:
    binaries = sorted((site / "torch_npu").rglob("*.so"))
    runtime, rest = out / "runtime.o", out / "rest.o"
    include = site / "torch_npu/include/third_party/acl/inc"
    _run("gcc", "-c", "-fPIC", "-O1", f"-I{include}", str(RUNTIME), "-o", str(runtime))
    defined = _symbols(runtime, "--defined-only")
    stubs = "".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted(unanswered(binaries) - defined))
    (out / "rest.c").write_text(stubs, encoding="ascii")
    # -w: the names of the compiler's own functions may be among them, with other types.
    _run("gcc", "-c", "-fPIC", "-w", str(out / "rest.c"), "-o", str(rest))
    main = out / MAIN_LIBRARY
    _run("gcc", "-shared", f"-Wl,-soname,{MAIN_LIBRARY}", str(runtime), str(rest), "-o", str(main))
    for name in absent_libraries(binaries) - {MAIN_LIBRARY}:
        # dlsym on any of them searches the libraries it needs, and so finds the main one's functions.
        link = ["-Wl,--no-as-needed", f"-Wl,-soname,{name}", f"-L{out}", f"-l:{MAIN_LIBRARY}"]
        _run("gcc", "-shared", *link, "-o", str(out / name))


def unanswered(binaries: list[Path]) -> set[str]:
    """Symbols that these binaries must find elsewhere and that neither they nor torch nor the system defines."""
    defined = set().union(*(_symbols(binary, "-D", "--defined-only") for binary in binaries))
    wanted = set().union(*(_symbols(binary, "-D", "--undefined-only") for binary in binaries))
    known = _torch_and_system()
    return {name for name in wanted - defined if not any(hasattr(library, name) for library in known)}


def absent_libraries(binaries: list[Path]) -> set[str]:
    """File names of the libraries that these binaries load and that are not on this machine."""
    import torch

    there = {path.name for path in (Path(torch.__file__).parent / "lib").iterdir()} | {path.name for path in binaries}
    needed: set[str] = set()
    for binary in binaries:
        needed |= set(re.findall(r"\(NEEDED\).*\[(.+)\]", _run("readelf", "-d", str(binary))))
    return {name for name in needed - there if not _loads(name)}


def _torch_and_system() -> list[ctypes.CDLL]:
    """The interpreter, and torch's binding with all that it depends on (torch, C++ and C runtime)."""
    import torch

    return [ctypes.CDLL(None), ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_python.so"))]


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _symbols(binary: Path, *options: str) -> set[str]:
    """Names, without version; weak undefined ones are left out: nobody has to answer them."""
    lines = (line.split() for line in _run("nm", *options, str(binary)).splitlines())
    return {parts[-1].split("@")[0] for parts in lines if len(parts) > 1 and parts[-2] not in ("w", "v")}


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StandInError(f"`{' '.join(command)}` failed:\n{done.stderr.strip()}")
    return done.stdout

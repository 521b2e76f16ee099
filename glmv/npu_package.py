"""torch_npu may be installed and yet be of no use, as on any machine without CANN. Everything else must still work.

Two libraries import it unasked and die with it: torch when it is imported itself ("autoload"), and transformers as soon
as it finds the package. `guard` keeps both from it; whoever wants an NPU asks `why_not`, which does the import.
This module imports neither of them.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

PACKAGE = "torch_npu"
NOT_INSTALLED = "torch_npu is not installed: pip install torch_npu, and source CANN's set_env.sh"

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
autoload_before = os.environ.get(AUTOLOAD)  # what torch sees in programs that do not import glmv first

PROBE_S = 180
_PROBE = """
import json
from glmv.npu_package import why_not
found = {"reason": why_not(), "count": 0, "name": ""}
if found["reason"] is None:
    import torch
    found["count"] = torch.npu.device_count()
    found["name"] = torch.npu.get_device_name(0) if found["count"] else ""
print(json.dumps(found))
"""

_reason: str | None = None


@dataclass(frozen=True)
class Probe:
    """NPUs that a process of its own saw, and the name of the first; or the `reason` why torch_npu is of no use."""

    reason: str | None
    count: int = 0
    name: str = ""


@functools.cache
def probe() -> Probe:
    """Ask a process of its own, which a broken installation may take down, and which alone the NPU is loaded in."""
    if not _is_installed() and sys.modules.get(PACKAGE) is None:
        return Probe(_reason or NOT_INSTALLED)
    command = [sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return Probe(f"torch_npu is installed, but asking it for its devices took more than {PROBE_S} s")
    if done.returncode == 0:
        return Probe(**json.loads(done.stdout.splitlines()[-1]))
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Probe(f"torch_npu is installed, but ends its process with exit code {done.returncode}: {last}")


def why_not() -> str | None:
    """Import torch_npu once; None if it is there to be used, else the reason why not, in one line.

    After a failure the package counts as not installed in this process, for transformers too.
    """
    global _reason
    if sys.modules.get(PACKAGE) is not None:
        return None
    if _reason is None and not _is_installed():
        return NOT_INSTALLED
    if _reason is None:
        _reason = _import()
    return _reason


def guard() -> None:
    """Before torch or transformers is imported: neither of them shall fail because torch_npu does."""
    os.environ.setdefault(AUTOLOAD, "0")
    if PACKAGE not in sys.modules and _is_installed():
        sys.meta_path.insert(0, _BeforeTransformers())


def describe(error: BaseException) -> str:
    """Why an import of torch_npu failed, and the way out, in one line."""
    said = " ".join(str(error).split()) or type(error).__name__
    cause = f"torch_npu is installed but cannot be imported: {said}"
    if "cannot open shared object file" in said:
        return f"{cause} (CANN is not installed, or its set_env.sh is not sourced)"
    return cause


def _is_installed() -> bool:
    return PACKAGE not in sys.modules and importlib.util.find_spec(PACKAGE) is not None


def _import() -> str | None:
    try:
        importlib.import_module(PACKAGE)
    except Exception as error:  # whatever the vendor's start-up raises, the CPU must remain usable
        # Python's own way of saying "there is no such module": find_spec answers None, and import fails.
        sys.modules[PACKAGE] = None  # type: ignore[assignment]
        return describe(error)
    return None


class _BeforeTransformers(importlib.abc.MetaPathFinder):
    """Asks `why_not` at the moment when transformers is imported, which would import torch_npu itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "transformers":
            sys.meta_path.remove(self)
            why_not()
        return None  # the other finders find it

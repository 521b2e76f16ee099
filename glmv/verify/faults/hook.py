"""Puts a seeded fault into a module while it is imported; the file on disk stays as it is.

`GLMV_FAULT=id` is honoured in a pytest process, and in what such a process started, be it through a launcher. Anywhere
else it is refused: a fault must never reach a training.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

from glmv.verify.faults.catalogue import FAULTS
from glmv.verify.faults.fault import Fault

VARIABLE = "GLMV_FAULT"
# Holds the process id of the test process, so that a variable which leaks into a shell opens nothing.
PARENT = "GLMV_FAULT_PARENT"


class _FaultyLoader(importlib.machinery.SourceFileLoader):
    """Compiles the changed source and keeps it out of the bytecode cache."""

    fault: Fault

    def get_code(self, fullname: str) -> CodeType:
        source = self.fault.apply(self.fault.path.read_text(encoding="utf-8"))
        return compile(source, str(self.fault.path), "exec", dont_inherit=True)


class _FaultFinder(importlib.abc.MetaPathFinder):
    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.fault.module:
            return None
        loader = _FaultyLoader(fullname, str(self.fault.path))
        loader.fault = self.fault
        return importlib.util.spec_from_file_location(fullname, str(self.fault.path), loader=loader)


def install_or_refuse() -> None:
    """Install the fault that the environment names.

    Raises:
        SystemExit: this is no test process, or the fault is unknown.
    """
    name = os.environ[VARIABLE]
    if "pytest" not in sys.modules and not _descends_from(os.environ.get(PARENT, "")):
        sys.exit(f"{VARIABLE}={name} puts a bug into glmv and is for test processes only. Unset it to go on.")
    fault = next((fault for fault in FAULTS if fault.id == name), None)
    if fault is None:
        sys.exit(f"{VARIABLE}={name}: no such fault. Known: {', '.join(fault.id for fault in FAULTS)}.")
    finder = _FaultFinder(fault)
    if fault.module in sys.modules:
        sys.exit(f"{VARIABLE}={name}: {fault.module} was imported before the fault could be put in.")
    sys.meta_path.insert(0, finder)
    if "pytest" in sys.modules:
        os.environ[PARENT] = str(os.getpid())


def _descends_from(ancestor: str) -> bool:
    """Whether the process with this id is the parent of this one, or its parent's parent and so on (on Linux)."""
    process = os.getppid()
    while process > 1:
        if str(process) == ancestor:
            return True
        try:
            stat = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            return False
        process = int(stat.rpartition(")")[2].split()[1])
    return False

"""Imports the real torch_npu on the stand-ins. Only in a process of its own: the name `npu` is taken for good."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from pathlib import Path

from glmv.verify.wheel.stand_ins import build

SETTINGS = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch would import the wheel before the stand-ins are there
    "TASK_QUEUE_ENABLE": "0",  # no thread that launches kernels
}


def load(site: Path) -> None:
    """Import torch_npu from a directory. Does nothing the second time.

    Raises:
        StandInError: the stand-ins cannot be built.
    """
    if str(site) in sys.path:
        return
    os.environ.update(SETTINGS)
    for library in build(site):
        # Once loaded globally, a library is found by its name: no LD_LIBRARY_PATH is needed.
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    sys.path.append(str(site))
    importlib.import_module("torch_npu")

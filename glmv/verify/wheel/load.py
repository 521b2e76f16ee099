"""Imports the real torch_npu on the stand-ins. Only in a process of its own: the name `npu` is taken for good."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from pathlib import Path

from glmv.verify.wheel.stand_ins import build

# Says that a process is one in which the wheel is to be loaded, and from where.
SITE = "GLMV_WHEEL_SITE"


def child_environment(site: Path) -> dict[str, str]:
    """The environment of a process that will `load` the wheel from `site`."""
    settings = {
        SITE: str(site),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch would import the wheel before the stand-ins are there
        "TASK_QUEUE_ENABLE": "0",  # no thread that launches kernels
    }
    return os.environ | settings


def load() -> None:
    """Import torch_npu from the directory that the environment names. Does nothing the second time.

    Raises:
        KeyError: this process was not started with `child_environment`.
        StandInError: the stand-ins cannot be built.
    """
    site = os.environ[SITE]
    if site in sys.path:
        return
    for library in build(Path(site)):
        # Once loaded globally, a library is found by its name: no LD_LIBRARY_PATH is needed.
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    sys.path.append(site)
    importlib.import_module("torch_npu")

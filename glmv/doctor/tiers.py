"""What each tier of the tests would run on here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec

from glmv import npu_package
from glmv.doctor.fact import Fact, State

PART = "tests"


def tiers() -> Iterator[Fact]:
    """Unit, distributed, npu and conformance."""
    import torch
    import torch.distributed as dist

    if find_spec("pytest") is None:
        yield Fact(PART, "pytest", "not installed", State.absent, 'pip install "glmv[dev]"')
    yield Fact(PART, "tests/unit", "cpu")
    if gpus := torch.cuda.device_count():
        yield Fact(PART, "tests/unit --device cuda", f"cuda ({gpus} devices)")
    ranks = dist.is_available() and dist.is_gloo_available()
    note = "" if ranks else "this torch has no gloo"
    yield Fact(PART, "tests/distributed", "cpu, gloo" if ranks else "not", State.good if ranks else State.broken, note)
    yield npu_tier()
    yield conformance_tier()


def npu_tier() -> Fact:
    """`pytest -m npu`."""
    name, found = "pytest -m npu", npu_package.probe()
    if found.count:
        return Fact(PART, name, f"npu ({found.count} x {found.name})")
    why = f"no real NPU: {found.reason or 'torch_npu sees no device'}"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return Fact(PART, name, "not", State.absent, f"{why}; and no C++ compiler to build the emulated one")
    return Fact(PART, name, "EMULATED npu", note=why)


def conformance_tier() -> Fact:
    """`make conformance`."""
    from glmv.verify.wheel.install import PINNED, installed_site
    from glmv.verify.wheel.stand_ins import missing_tools

    if missing := missing_tools():
        return Fact(PART, "make conformance", "not", State.absent, f"no {', '.join(missing)}: install gcc and binutils")
    if site := installed_site():
        return Fact(PART, "make conformance", f"torch_npu {PINNED} on vendor stand-ins", note=str(site))
    return Fact(PART, "make conformance", f"torch_npu {PINNED}, to be downloaded", note="43 MB, into build/conformance")

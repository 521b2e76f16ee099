"""Which NPU the tests with the marker `npu` get."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from _pytest.junitxml import xml_key

from glmv import npu_package

NPU = pytest.StashKey["Npu"]()


@dataclass(frozen=True)
class Npu:
    """`name` of a real device, or None for the emulated one; `why` there is no real one."""

    name: str | None
    why: str = ""

    @property
    def emulated(self) -> bool:
        """True if no test of this session sees real hardware."""
        return self.name is None

    def __str__(self) -> str:
        return "npu: EMULATED (contract operators on host memory)" if self.emulated else f"npu: {self.name}"


def choose_npu(asked: str) -> Npu:
    """What `--npu` stands for on this machine.

    Args:
        asked: "auto", "real" or "emulated".
    Raises:
        pytest.UsageError: a real NPU was asked for, and there is none.
    """
    if asked == "emulated":
        return Npu(None, "asked for")
    return require_npu("--npu real") if asked == "real" else _real_npu()


def require_npu(option: str) -> Npu:
    """The real NPU that an option asks for.

    Raises:
        pytest.UsageError: there is none.
    """
    npu = _real_npu()
    if npu.emulated:
        raise pytest.UsageError(
            f"{option}: {npu.why}. Without an NPU, `pytest -m npu` runs the tests of the NPU on the emulated device."
        )
    return npu


def announce(config: pytest.Config, npu: Npu) -> None:
    """Have header, summary and JUnit file say what tests with the marker `npu` ran on."""
    config.stash[NPU] = npu
    if (junit := config.stash.get(xml_key, None)) is not None:
        junit.add_global_property("npu", str(npu).partition(": ")[2])


def _real_npu() -> Npu:
    # Another process is asked: this one never loads the NPU's package, so that its CPU tests stay as they are.
    found = npu_package.probe()
    if found.reason is None and found.count:
        return Npu(f"{found.count} x {found.name}")
    return Npu(None, found.reason or "torch_npu shows no device")

"""Whether this process has the emulated device, and with which settings."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from glmv.verify.emulated_npu.errors import EmulationError


@dataclass(frozen=True)
class Settings:
    """What `install` was asked for."""

    devices: int
    poison: bool


@dataclass(frozen=True)
class Installed:
    """The device of this process."""

    settings: Settings
    extension: ModuleType


_installed: Installed | None = None


def installed() -> Installed | None:
    """The device of this process, if it has one."""
    return _installed


def remember(device: Installed) -> None:
    """PyTorch cannot forget a device: this is said once in the life of a process."""
    global _installed
    _installed = device


def extension() -> ModuleType:
    """The C++ extension.

    Raises:
        EmulationError: this process has no emulated device.
    """
    if _installed is None:
        raise EmulationError("This process has no emulated npu. Call glmv.verify.emulated_npu.install() first.")
    return _installed.extension

"""Give this process an emulated npu: device, operators, collectives and the `torch_npu` stand-in."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

from glmv.verify.emulated_npu import build, collectives, device, operators
from glmv.verify.emulated_npu.errors import EmulationError
from glmv.verify.emulated_npu.state import Installed, Settings, installed, remember

_libraries: list[torch.library.Library] = []  # a library that is garbage-collected takes its operators with it


def install(devices: int = 1, *, poison: bool = False) -> None:
    """Register the emulated npu with PyTorch; there is no way back in this process.

    Args:
        devices: how many, at least 1. Each rank of a group sees all of them and uses its own.
        poison: fill fresh memory with NaN (integers with a large odd value), so that whoever reads memory that nobody
            wrote gets an answer that shows it.

    Raises:
        EmulationError: a real NPU or the real torch_npu is here, the device was installed with other settings, or the
            extension cannot be built.
    """
    wanted, here = Settings(devices, poison), installed()
    if here is not None:
        refuse_other(here.settings, wanted)
        return
    refuse_real()
    if devices < 1:
        raise EmulationError(f"install(devices={devices}): the emulated machine needs at least one device.")
    extension = build.load()
    remember(Installed(wanted, extension))
    extension.configure(devices, poison)
    register_device()
    _libraries.append(operators.register())
    sys.modules["torch_npu"] = operators.make_torch_npu()
    collectives.register()


def refuse_other(old: Settings, wanted: Settings) -> None:
    """A process has one device with one setting."""
    if old != wanted:
        raise EmulationError(
            f"This process has an emulated npu with {old}, and cannot get one with {wanted}: start another process."
        )


def refuse_real() -> None:
    """Where a real NPU can be used, nothing is emulated."""
    if Path("/dev/davinci_manager").exists() and importlib.util.find_spec("torch_npu") is not None:
        raise EmulationError("A real NPU is here (/dev/davinci_manager, torch_npu): use it, not the emulated one.")
    if sys.modules.get("torch_npu") is not None or torch._C._get_privateuse1_backend_name() != "privateuseone":
        raise EmulationError(
            "This process has imported torch_npu or another device extension, which took the place of the emulated npu."
            " Start one with TORCH_DEVICE_BACKEND_AUTOLOAD=0."
        )


def register_device() -> None:
    """`torch.npu`, `Tensor.npu()`, `Module.npu()` and the name "npu"."""
    torch.utils.rename_privateuse1_backend("npu")
    module = device.make_module()
    torch._register_device_module("npu", module)
    sys.modules["torch.npu"] = module
    torch.utils.generate_methods_for_privateuse1_backend()
    device.manual_seed_all(torch.initial_seed() % 2**63)

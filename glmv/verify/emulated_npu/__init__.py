"""An npu that is not there: operators of the contract on host memory, for a process of its own.

    from glmv.verify import emulated_npu
    emulated_npu.install(devices=2, poison=True)
    torch.ones(2, device="npu:1")

Runs the machine's NPU path unmodified, counts what it does to the device, and cannot see what docs/npu-emulation.md
lists. Nothing but a child process of the npu tier installs it.
"""

from glmv.verify.emulated_npu.counting import Counted, Recorded, TensorMeta, count
from glmv.verify.emulated_npu.errors import EmulationError
from glmv.verify.emulated_npu.install import install
from glmv.verify.emulated_npu.state import installed

__all__ = ["Counted", "EmulationError", "Recorded", "TensorMeta", "count", "describe", "install", "is_emulated"]


def is_emulated() -> bool:
    """Whether the npu of this process is emulated."""
    return installed() is not None


def describe() -> str:
    """One line for headers and reports; says that nothing here is hardware.

    Raises:
        EmulationError: this process has no emulated device.
    """
    here = installed()
    if here is None:
        raise EmulationError("This process has no emulated npu. Call glmv.verify.emulated_npu.install() first.")
    poison = ", fresh memory poisoned with NaN" if here.settings.poison else ""
    return f"EMULATED npu: contract operators on host memory, {here.settings.devices} device(s){poison}"

"""`torch.npu`: the device module that PyTorch, FSDP2 and the machine ask for streams, random numbers and memory."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from glmv.verify.emulated_npu.state import extension, installed

DeviceLike = torch.device | str | int | None
DEVICE_NAME = "EMULATED npu on host memory"


# What `torch_npu._C._npu_getOption` tells of what was set; without formats and a compiler, nothing heeds it.
options = {"ALLOW_INTERNAL_FORMAT": b"", "jitCompile": b""}


class _Config:
    """`torch.npu.config`: as torch_npu's, its switch can be set and not read."""

    def __setattr__(self, name: str, value: bool) -> None:
        options[name.upper()] = _switched(value)


def _switched(on: bool) -> bytes:
    return b"enable" if on else b"disable"


class Stream(torch.Stream):
    """A stream. Work runs when it is called, so streams never overlap."""

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **kwargs: Any) -> Stream:  # noqa: ANN401
        """A new stream of `device`, or (by keyword) a given one."""
        if kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, torch.device("npu", index_of(device)), priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """A new event of the npu; it has always happened already. PyTorch compares events of no subclass."""
    return torch.Event("npu", enable_timing=enable_timing, blocking=blocking)


class device:
    """Context: make a device current."""

    def __init__(self, device: DeviceLike) -> None:
        self.index = -1 if device is None else index_of(device)
        self.old = -1

    def __enter__(self) -> None:
        self.old = current_device()
        if self.index >= 0:
            set_device(self.index)

    def __exit__(self, *_: object) -> None:
        set_device(self.old)


def index_of(device: DeviceLike) -> int:
    """The index of a device; the current one where none is named."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def device_count() -> int:
    """How many devices are emulated."""
    here = installed()
    return 0 if here is None else here.settings.devices


def current_device() -> int:
    """The current device's index."""
    return int(extension().current_device())


def set_device(device: DeviceLike) -> None:
    """Make `device` current in this thread."""
    extension().set_device(index_of(device))


def synchronize(device: DeviceLike = None) -> None:
    """Wait for the device: counted, and nothing to wait for."""
    extension().count_sync("synchronize")


def current_stream(device: DeviceLike = None) -> torch.Stream:
    """The stream that work of this thread goes to."""
    return _as_stream(torch.accelerator.current_stream(torch.device("npu", index_of(device))))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    """The stream that work goes to unless told otherwise."""
    return Stream(stream_id=0, device_index=index_of(device), device_type=_device_type())


def set_stream(stream: torch.Stream) -> None:
    """Make `stream` the current one of its device."""
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream | None) -> Any:  # noqa: ANN401
    """Context: work goes to `stream`."""
    return _NoStream() if stream is None else stream


class _NoStream:
    def __enter__(self) -> None:
        """Stay on the current stream."""

    def __exit__(self, *_: object) -> None:
        """Nothing was changed."""


def _as_stream(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def _device_type() -> int:
    return torch.accelerator.current_stream(torch.device("npu", 0)).device_type


def _generators() -> list[torch.Generator]:
    return [extension().generator(index) for index in range(device_count())]


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    extension().generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed every device."""
    for generator in _generators():
        generator.manual_seed(seed)


def initial_seed() -> int:
    """The seed of the current device."""
    return int(extension().generator(current_device()).initial_seed())


def get_rng_state(device: DeviceLike = None) -> Tensor:
    """The state of a device's generator, a uint8 tensor on the CPU."""
    return extension().generator(index_of(device)).get_state()


def set_rng_state(state: Tensor, device: DeviceLike = None) -> None:
    """Put back what `get_rng_state` gave."""
    extension().generator(index_of(device)).set_state(state)


def get_rng_state_all() -> list[Tensor]:
    """The state of every device."""
    return [generator.get_state() for generator in _generators()]


def set_rng_state_all(states: Iterable[Tensor]) -> None:
    """Put back what `get_rng_state_all` gave."""
    for generator, state in zip(_generators(), states):
        generator.set_state(state)


def memory_allocated(device: DeviceLike = None) -> int:
    """Bytes that tensors of the device hold."""
    return int(extension().memory_now(index_of(device)))


def max_memory_allocated(device: DeviceLike = None) -> int:
    """The most bytes held at once since the start or the last reset."""
    return int(extension().memory_peak(index_of(device)))


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Count the peak anew."""
    extension().reset_memory_peak(index_of(device))


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """(free, total) bytes; the emulated device is as large as an Atlas A2's 64 GiB and refuses nothing."""
    total = 64 * 2**30
    return max(total - memory_allocated(device), 0), total


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    """The part of the allocator's statistics that exists here."""
    now, peak = memory_allocated(device), max_memory_allocated(device)
    names = ("allocated_bytes", "reserved_bytes", "active_bytes")
    rows = {f"{name}.all.current": now for name in names} | {f"{name}.all.peak": peak for name in names}
    return rows | {"num_alloc_retries": 0, "num_ooms": 0}


def empty_cache() -> None:
    """Memory goes back to the host as soon as it is free: there is no cache."""


def get_device_name(device: DeviceLike = None) -> str:
    """A name that nobody takes for hardware."""
    return DEVICE_NAME


def get_device_properties(device: DeviceLike = None) -> types.SimpleNamespace:
    """Name and memory."""
    return types.SimpleNamespace(name=DEVICE_NAME, total_memory=mem_get_info(device)[1])


def get_device_capability(device: DeviceLike = None) -> None:
    """Ascend devices have no compute capability."""


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What autocast may compute in."""
    return [torch.float16, torch.bfloat16, torch.float32]


def set_compile_mode(jit_compile: bool = False) -> None:
    """Whether every new shape is compiled; remembered and of no effect."""
    options["jitCompile"] = _switched(jit_compile)


def _true(*_: object, **__: object) -> bool:
    return True


def _false(*_: object, **__: object) -> bool:
    return False


def _nothing(*_: object, **__: object) -> None:
    """What has no meaning on host memory."""


def make_module() -> types.ModuleType:
    """A module object for `torch.npu`; of its names none is missing in torch_npu's."""
    module = types.ModuleType("torch.npu", __doc__)
    public = {name: value for name, value in globals().items() if callable(value) and not name.startswith("_")}
    for foreign in ("extension", "installed", "index_of", "make_module", "Any", "Iterable", "Tensor", "DeviceLike"):
        public.pop(foreign, None)
    module.__dict__.update(public, config=_Config())
    module.__dict__.update(
        is_available=_true,
        is_initialized=_true,
        is_bf16_supported=_true,
        _is_in_bad_fork=_false,
        is_current_stream_capturing=_false,
        init=_nothing,
        _lazy_init=_nothing,
        _initialized=True,  # recomputation keeps random numbers of initialised devices only
        max_memory_reserved=max_memory_allocated,
        memory_reserved=memory_allocated,
    )
    return module

"""The process group: who this rank is, on which device, and how a failure on one rank ends all of them.

Ranks come from torchrun's environment, or the process stands alone with world size 1 (and then opens no port).
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from glmv import npu_package
from glmv.errors import GlmvError
from glmv.parallel import npu

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
LAUNCH_KEYS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
DEFAULT_TIMEOUT = timedelta(minutes=10)

logger = logging.getLogger("glmv.parallel")


class LaunchError(GlmvError):
    """The environment does not say who this rank is, or its device is missing. Known to this rank alone."""


class AgreedError(GlmvError):
    """A failure that every rank knows and raises alike; rank 0 prints it."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Process:
    """This rank.

    Attributes:
        meshes: by axes and sizes, what `glmv.parallel.mesh` has laid out so far. Groups of ranks keep threads of their
            own until the process leaves, so that a mesh that is asked for again must be the same one.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    meshes: dict[tuple[tuple[str, ...], tuple[int, ...]], DeviceMesh] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def is_main(self) -> bool:
        """True on the rank that prints and writes shared files."""
        return self.rank == 0


_current: Process | None = None


def current() -> Process:
    """The rank set up by `process_group`. Raises RuntimeError outside of it."""
    if _current is None:
        raise RuntimeError("no process group yet: run this inside `with process_group():`")
    return _current


@contextlib.contextmanager
def process_group(device: str = "auto", timeout: timedelta = DEFAULT_TIMEOUT) -> Iterator[Process]:
    """Join the process group for the length of a block, and leave it whatever happens.

    Args:
        device: "cpu", "cuda", "npu", or "auto" for the best one present.
        timeout: after how long a collective that some rank never joins fails.
    Raises:
        LaunchError: wrong RANK, WORLD_SIZE or LOCAL_RANK; no such device; a group exists already.
    """
    global _current
    if dist.is_initialized():
        raise LaunchError("this process belongs to a process group already; leave it before starting another.")
    rank, world_size, local_rank = read_launch_environment(os.environ)
    _current = Process(rank, world_size, local_rank, choose_device(device, local_rank))
    try:
        _initialise(_current, timeout)
        yield _current
    finally:
        _current = None
        if dist.is_initialized():
            dist.destroy_process_group()


def read_launch_environment(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, world_size, local_rank) as torchrun exports them; (0, 1, 0) where it exports nothing.

    Raises:
        LaunchError: some of the variables are missing, not integers, contradict each other, or name no port.
    """
    present = [key for key in LAUNCH_KEYS[:3] if environ.get(key)]
    if not present:
        return 0, 1, 0
    needed = LAUNCH_KEYS if environ.get("WORLD_SIZE") not in (None, "", "1") else LAUNCH_KEYS[:3]
    missing = [key for key in needed if not environ.get(key)]
    if missing:
        raise LaunchError(
            f"the environment has {', '.join(present)} but not {', '.join(missing)}. "
            "Start with torchrun, which sets all of them, or unset them to run alone."
        )
    rank, world_size, local_rank = (_integer(environ, key) for key in LAUNCH_KEYS[:3])
    if world_size < 1:
        raise LaunchError(f"WORLD_SIZE = {world_size}, but there is at least one rank.")
    for key, value in (("RANK", rank), ("LOCAL_RANK", local_rank)):
        if not 0 <= value < world_size:
            raise LaunchError(f"{key} = {value} is outside 0..{world_size - 1} (WORLD_SIZE = {world_size}).")
    if world_size > 1 and environ["MASTER_PORT"] == "0":
        raise LaunchError(
            "MASTER_PORT = 0: torchrun --master-port 0 does not tell the ranks which port it got, so they cannot meet. "
            "Use torchrun --standalone, which does."
        )
    return rank, world_size, local_rank


def _integer(environ: Mapping[str, str], key: str) -> int:
    try:
        return int(environ[key])
    except ValueError:
        raise LaunchError(f'{key} = "{environ[key]}" is not an integer; leave it to torchrun to set it.') from None


def choose_device(requested: str, local_rank: int) -> torch.device:
    """The device of this rank. "auto" prefers npu, then cuda, then cpu; torch_npu is imported only when it is there.

    Raises:
        LaunchError: the device is unknown or absent, or there are fewer of them than local ranks.
    """
    if requested not in ("auto", *BACKENDS):
        raise LaunchError(f'device "{requested}" is unknown. Choose auto, {", ".join(BACKENDS)}.')
    no_npu = npu_package.why_not() if requested in ("auto", "npu") else "not asked for"
    npus = 0 if no_npu else torch.get_device_module("npu").device_count()
    counts = {"npu": npus, "cuda": torch.cuda.device_count(), "cpu": 1}
    kind = next(kind for kind, count in counts.items() if count) if requested == "auto" else requested
    if requested == "auto" and no_npu not in (None, npu_package.NOT_INSTALLED) and local_rank == 0:
        logger.warning("%s. Going on with %s.", no_npu, kind)
    if not counts[kind]:
        why = no_npu if kind == "npu" and no_npu else "this machine shows none"
        raise LaunchError(f"device {kind} was asked for, but {why}. `glmv doctor` tells more.")
    if kind == "cpu":
        return torch.device("cpu")
    if local_rank >= counts[kind]:
        raise LaunchError(
            f"LOCAL_RANK = {local_rank} needs {local_rank + 1} {kind} devices, this machine shows {counts[kind]}. "
            f"Use --nproc-per-node {counts[kind]} or fewer."
        )
    return torch.device(kind, local_rank)


def take_device(device: torch.device) -> None:
    """Make a device that `choose_device` gave the current one of this process, set up as training needs it."""
    if device.type != "cpu":
        torch.get_device_module(device.type).set_device(device)
    if device.type == "npu":
        npu.set_up()


def _initialise(process: Process, timeout: timedelta) -> None:
    backend = BACKENDS[process.device.type]
    take_device(process.device)
    if process.device.type != "cpu":
        # Objects and error messages travel between CPUs, so that they never wait for a queue of kernels.
        backend = f"cpu:gloo,{process.device.type}:{backend}"
    if process.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
        # A rank that leaves at once must not take away connections that a slower one is still about to make.
        dist.all_reduce(torch.zeros(()))


def raise_on_all_ranks(error: Exception | None) -> None:
    """Collective: return if no rank has an error, else end every rank with the same message.

    A rank whose error is not a GlmvError (a bug) keeps it, traceback included; the others name that rank and the error.

    Raises:
        AgreedError: with each distinct message once, and the ranks it came from where not all of them share it.
    """
    failed = torch.tensor(0 if error is None else 1)
    if dist.get_world_size() > 1:
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if not failed:
        return
    if error is not None and not isinstance(error, GlmvError):
        reports = _gather(f"stopped by {type(error).__name__}: {error}", 1)
        raise error
    reports = _gather(None if error is None else str(error), getattr(error, "exit_code", 0))
    messages: dict[str, list[int]] = {}
    for rank, (message, _) in enumerate(reports):
        if message is not None:
            messages.setdefault(message, []).append(rank)
    lines = [
        message if len(ranks) == len(reports) else f"{_name_ranks(ranks)}: {message}"
        for message, ranks in messages.items()
    ]
    raise AgreedError("\n".join(lines), exit_code=max(code for _, code in reports)) from error


def _gather(message: str | None, code: int) -> list[tuple[str | None, int]]:
    reports: list[tuple[str | None, int]] = [(None, 0)] * dist.get_world_size()
    dist.all_gather_object(reports, (message, code))
    return reports


def _name_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


@contextlib.contextmanager
def on_all_ranks() -> Iterator[None]:
    """Run a block that holds no collective; if it fails on any rank, it fails on all (see `raise_on_all_ranks`)."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # a bug on one rank must end the others too, so nothing is let through here
        error = caught
    raise_on_all_ranks(error)


def exit_with(error: GlmvError) -> NoReturn:
    """Print a user's error once and exit with its code.

    What every rank knows is printed by rank 0, and the others wait for that: a launcher kills the rest of the group as
    soon as one rank is gone. What one rank alone knows is printed by that rank.
    """
    if not isinstance(error, AgreedError) or not dist.is_initialized():
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code)
    if dist.get_rank() == 0:
        print(error, file=sys.stderr, flush=True)
    # A rank that a bug ended is gone already, and waiting for it fails.
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(torch.zeros(()))
    raise SystemExit(error.exit_code)

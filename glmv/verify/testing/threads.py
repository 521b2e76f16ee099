"""Ranks as threads of this process: a millisecond a case, for properties of pure exchanges.

Their collectives are simulated on shared memory: all_to_all_single with uneven and empty splits, reductions and
sub-meshes are right; point-to-point is not there, and the generator of random numbers is shared, so that weights are
to be handed in and not drawn on each rank. What depends on real transport, on time or on processes belongs to tests
with the marker `world_size`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

Result = TypeVar("Result")
# How long ranks that were given up may take to leave their collective.
WAKE_S = 30.0


class ThreadRankError(Exception):
    """A rank failed; its own exception is the cause."""


def run_ranks(world_size: int, function: Callable[[int], Result], timeout_s: float = 120.0) -> list[Result]:
    """Run `function(rank)` on every rank, within a process group of threads.

    Args:
        world_size: number of ranks.   function: may call `torch.distributed`; gradients are recorded as usual.
        timeout_s: for all ranks together.
    Returns:
        What each rank returned, by rank.
    Raises:
        ThreadRankError: a rank raised (the first one that did is named), or did not come to an end.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        raise ThreadRankError("this process belongs to a process group of its own: run_ranks is for tests without one")
    results: dict[int, Result] = {}
    errors: list[tuple[int, BaseException]] = []
    store = dist.HashStore()

    def be(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors.append((rank, error))
            _wake_the_others(error)
        finally:
            dist.destroy_process_group()

    with _threaded_world():
        hanging = _run_threads(
            [threading.Thread(target=be, args=(r,), daemon=True) for r in range(world_size)], timeout_s
        )
    if hanging:
        raise ThreadRankError(f"ranks {hanging} were not done after {timeout_s:g} s")
    if errors:
        rank, error = errors[0]
        raise ThreadRankError(f"rank {rank}: {type(error).__name__}: {error}") from error
    return [results[rank] for rank in range(world_size)]


def _run_threads(threads: list[threading.Thread], timeout_s: float) -> list[int]:
    """Start all and wait; the indices of those that had to be given up."""
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    hanging = [index for index, thread in enumerate(threads) if thread.is_alive()]
    if hanging:
        _wake_the_others(TimeoutError("another rank did not come"))
        deadline = time.monotonic() + WAKE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    return hanging


def _wake_the_others(error: BaseException) -> None:
    from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

    ProcessLocalGroup.exception_handle(error)


@contextlib.contextmanager
def _threaded_world() -> Iterator[None]:
    """Every thread has process groups of its own."""
    from torch._C import _distributed_c10d
    from torch.testing._internal.distributed import multi_threaded_pg

    # c10d keeps groups by name for the whole process, unless it is told that threads are ranks.
    _distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    multi_threaded_pg._install_threaded_pg()
    try:
        yield
    finally:
        multi_threaded_pg.ProcessLocalGroup.reset()
        multi_threaded_pg._uninstall_threaded_pg()
        _distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]

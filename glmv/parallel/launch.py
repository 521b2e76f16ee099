"""Start N ranks of a command on this machine, and bring every one of them to an end.

The ranks see the environment that torchrun gives its workers. Unlike torchrun, the caller gets each rank's own exit
code and output, a rank that hangs prints its stacks before it is killed, and nothing a rank started outlives it. The
rendezvous store is held by the caller on a port that the system chose: two launches never meet on one port.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

# How long a rank may print its stacks after SIGABRT.
STACKS_S = 15.0
POLL_S = 0.02


@dataclass(frozen=True)
class RankResult:
    """How one rank ended. `exit_code` is negative for the signal that ended it, as in `subprocess`."""

    rank: int
    exit_code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended; `ok` only if every rank ended with 0 within the time."""

    ranks: tuple[RankResult, ...]
    timed_out: bool

    @property
    def ok(self) -> bool:
        """True if all ranks ended well."""
        return not self.timed_out and all(rank.exit_code == 0 for rank in self.ranks)

    def describe(self, tail: int = 4000) -> str:
        """Every rank's exit code and the end of what it printed, for a failure message."""
        head = "the launch ran out of time" if self.timed_out else "the launch ended"
        lines = [f"{head}; exit codes {[rank.exit_code for rank in self.ranks]}"]
        for rank in self.ranks:
            lines.append(f"--- rank {rank.rank}, exit code {rank.exit_code}")
            lines.append(rank.stdout[-tail:] + rank.stderr[-tail:])
        return "\n".join(lines)


def launch(
    command: Sequence[str],
    *,
    nproc: int,
    timeout_s: float,
    grace_s: float = 5.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> LaunchResult:
    """Run `python COMMAND` as `nproc` ranks and wait for all of them.

    Args:
        command: arguments of the Python interpreter, such as ("-m", "glmv", "train", "tiny.yaml").
        nproc: number of ranks.
        timeout_s: for the whole launch; afterwards every rank prints its stacks and is killed.
        grace_s: how long the other ranks may go on and report once one has failed.
        env: additions to this process's environment.   cwd: working directory of the ranks.
    Returns:
        What every rank printed and how it ended; it never raises for a rank that failed.
    """
    store = rendezvous(timeout_s)
    with tempfile.TemporaryDirectory(prefix="glmv-launch-") as logs:
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(nproc):
                environ = {**os.environ, **(env or {}), **worker_environment(rank, nproc, store.port)}
                ranks.append(_start(command, environ, cwd, Path(logs), rank))
            timed_out = _wait(ranks, time.monotonic() + timeout_s, grace_s)
        finally:
            for process in ranks:
                _kill(process, signal.SIGKILL)
                process.wait()
        results = [_result(rank, process.returncode, Path(logs)) for rank, process in enumerate(ranks)]
    return LaunchResult(tuple(results), timed_out)


def rendezvous(timeout_s: float) -> dist.TCPStore:
    """A store for the ranks of one launch, on a port that the system chose; it lives as long as this object."""
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)


def worker_environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """What torchrun would tell a rank of this machine whose store listens on `port`."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The store is served by this process, so that no rank has to; torchrun says so by the same two names.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        # Several ranks share the cores; torch's default of one thread per core and rank is tens of times slower.
        "OMP_NUM_THREADS": "1",
        # Makes SIGABRT print the Python stack of every thread.
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _start(
    command: Sequence[str], environ: dict[str, str], cwd: Path | None, logs: Path, rank: int
) -> "subprocess.Popen[bytes]":
    with open(logs / f"{rank}.out", "wb") as out, open(logs / f"{rank}.err", "wb") as err:
        return subprocess.Popen(
            [sys.executable, *command], env=environ, cwd=cwd, stdout=out, stderr=err, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip


def _wait(ranks: "Sequence[subprocess.Popen[bytes]]", deadline: float, grace_s: float) -> bool:
    """Wait for all ranks; after a failure or past the deadline, end the rest. True if the deadline passed."""
    while None in (codes := [rank.poll() for rank in ranks]):
        if any(codes):
            _end(ranks, min(deadline, time.monotonic() + grace_s))
            return False
        if time.monotonic() > deadline:
            _end(ranks, deadline)
            return True
        time.sleep(POLL_S)
    return False


def _end(ranks: "Sequence[subprocess.Popen[bytes]]", deadline: float) -> None:
    """Let the ranks run until `deadline`, then have those left print their stacks."""
    _until(ranks, deadline)
    for rank in ranks:
        _kill(rank, signal.SIGABRT)
    _until(ranks, time.monotonic() + STACKS_S)


def _until(ranks: "Sequence[subprocess.Popen[bytes]]", deadline: float) -> None:
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(POLL_S)


def _kill(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    """Signal a rank and all that it started: they are one session. SIGKILL also reaches what a finished rank left."""
    if number != signal.SIGKILL and process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _result(rank: int, exit_code: int, logs: Path) -> RankResult:
    texts = [(logs / f"{rank}.{kind}").read_text(errors="replace") for kind in ("out", "err")]
    return RankResult(rank, exit_code, *texts)

"""What became of other processes."""

import time

import psutil

# Whatever is waited for needs a process that imports torch, on a machine with other things to do; a test's own time
# limit, which prints the stacks, comes later.
PATIENCE_S = 240


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended; what has ended may still wait for its parent to ask."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def eventually(condition) -> bool:
    """Whether a condition comes true, be it late."""
    deadline = time.monotonic() + PATIENCE_S
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return true

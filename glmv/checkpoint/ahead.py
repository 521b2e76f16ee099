"""Work done ahead of where it is used: a few threads read and transpose while another writes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")
WORKERS = min(8, os.cpu_count() or 1)


def run_ahead(jobs: Iterable[Callable[[], Result]]) -> Iterator[Result]:
    """Run jobs in threads and yield their results in order; at most `WORKERS` results wait to be taken.

    `jobs` itself is consumed by the caller's thread, job by job as results are taken.
    """
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            for job in jobs:
                waiting.append(pool.submit(job))
                if len(waiting) >= WORKERS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

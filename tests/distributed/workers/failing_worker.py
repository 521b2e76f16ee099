"""Fail on rank 1 only. Usage: failing_worker.py bug|mistake"""

import sys

from glmv.errors import GlmvError
from glmv.parallel.process import exit_with, on_all_ranks, process_group

with process_group("cpu") as process:
    try:
        with on_all_ranks():
            if process.rank == 1:
                raise KeyError("a bug") if sys.argv[1] == "bug" else GlmvError("no such picture")
    except GlmvError as error:
        exit_with(error)

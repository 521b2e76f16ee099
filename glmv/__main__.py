"""`python -m glmv`, which is also how torchrun starts it."""

import os
import sys

from glmv.cli import main


def exit_code() -> int:
    """Run the command line; the exit code of this process."""
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    code = exit_code()
    if os.environ.get("WORLD_SIZE") in (None, "", "1"):
        sys.exit(code)
    # Of several ranks: without the interpreter's own end, in which threads of a process group have been seen to abort.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""One rank of a recorded training run: `python -m glmv.verify.candidate TRACE CONFIG.yaml [section.key=value ...]`."""

from __future__ import annotations

import sys
from pathlib import Path

from glmv.config import load_config
from glmv.errors import GlmvError
from glmv.parallel.process import exit_with, process_group
from glmv.train.trainer import Trainer
from glmv.verify.trace import Recorder


def main(arguments: list[str]) -> None:
    """Train as `glmv train` does, with a recorder watching."""
    directory, config, *overrides = arguments
    with process_group():
        try:
            Trainer(load_config(Path(config), overrides), observer=Recorder(Path(directory))).run()
        except GlmvError as error:
            exit_with(error)


if __name__ == "__main__":
    main(sys.argv[1:])

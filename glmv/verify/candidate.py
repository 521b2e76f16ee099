"""One rank of a recorded training run.

`python -m glmv.verify.candidate TRACE BUFFERS CONFIG.yaml [section.key=value ...]`; BUFFERS is fp32 or bf16.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from glmv.config import load_config
from glmv.errors import GlmvError
from glmv.parallel.process import exit_with, process_group
from glmv.train.trainer import Trainer
from glmv.verify.trace import Recorder


def main(arguments: list[str]) -> None:
    """Train as `glmv train` does, with a recorder watching."""
    directory, buffers, config, *overrides = arguments
    rounded_to = torch.bfloat16 if buffers == "bf16" else None
    with process_group():
        try:
            recorder = Recorder(Path(directory))
            Trainer(load_config(Path(config), overrides), observer=recorder, buffers=rounded_to).run()
        except GlmvError as error:
            exit_with(error)


if __name__ == "__main__":
    main(sys.argv[1:])

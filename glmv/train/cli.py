"""`glmv train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from glmv.config import Config
    from glmv.errors import GlmvError


def train_command(
    config: Annotated[Path, typer.Argument(help="Training config (YAML).")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[section.key=value]...")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, npu, or auto for the best one present.")] = "auto",
    timeout: Annotated[float, typer.Option(help="Seconds after which a rank that others wait for ends the run.")] = 600,
) -> None:
    """Train. Start several ranks with torchrun: torchrun --nproc-per-node 4 -m glmv train CONFIG.yaml."""
    import logging
    import os
    from datetime import timedelta

    from glmv.errors import GlmvError
    from glmv.parallel.process import exit_with, process_group, raise_on_all_ranks, read_launch_environment

    rank, world_size, _ = read_launch_environment(os.environ)
    logging.basicConfig(format="%(message)s", level=logging.WARNING if rank == 0 else logging.ERROR)
    loaded = load(config, overrides or [])
    if isinstance(loaded, GlmvError) and world_size == 1:
        raise loaded
    with process_group(device, timedelta(seconds=timeout)):
        # Imported late: it takes seconds, and a wrong config is told without it.
        from glmv.train.trainer import Trainer

        try:
            # Several ranks meet even to fail, so that one of them can tell it for all.
            raise_on_all_ranks(loaded if isinstance(loaded, GlmvError) else None)
            assert not isinstance(loaded, GlmvError)
            Trainer(loaded).run()
        except GlmvError as error:
            exit_with(error)


def load(path: Path, overrides: list[str]) -> Config | GlmvError:
    """The config, or why `glmv train` cannot run it: what is wrong in it, or not built yet."""
    from glmv.config import ConfigError, load_config, unbuilt
    from glmv.errors import GlmvError

    try:
        config = load_config(path, overrides)
    except GlmvError as error:
        return error
    if refused := unbuilt(config):
        return ConfigError("\n".join([f"{path}: glmv train cannot do this yet.", *refused]))
    return config

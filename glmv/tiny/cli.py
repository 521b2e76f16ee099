"""`glmv make-tiny`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def make_tiny_command(
    directory: Annotated[Path, typer.Argument(help="Where to write; made if it doesn't exist.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights.")] = 0,
    force: Annotated[
        bool,
        typer.Option("--force", help="Write into a directory of other things too, and remove its safetensors files."),
    ] = False,
) -> None:
    """Write a complete GLM-4.5V directory in Hugging Face format that trains on one CPU core."""
    from glmv.tiny.make import make_tiny

    written = make_tiny(directory, seed=seed, force=force)
    shards = sorted(written.glob("*.safetensors"))
    megabytes = sum(path.stat().st_size for path in shards) / 1e6
    print(f"make-tiny  {written}  {len(shards)} shards  {megabytes:.2f} MB of weights  seed {seed}")

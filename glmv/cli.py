"""The `glmv` command: one message and exit code 2 for a user's mistake, never a traceback.

Command modules import torch inside their functions, so that `glmv --help` answers at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from glmv import __version__
from glmv.checkpoint.cli import convert_app
from glmv.config.cli import config_reference_command
from glmv.doctor.cli import doctor_command
from glmv.errors import GlmvError
from glmv.tiny.cli import make_tiny_command
from glmv.train.cli import train_command
from glmv.verify.cli import verify_command
from glmv.verify.faults.cli import faults_command

app = typer.Typer(
    name="glmv",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("make-tiny")(make_tiny_command)
app.command("train")(train_command)
app.command("verify")(verify_command)
app.command("doctor")(doctor_command)
app.command("config-reference")(config_reference_command)
# What follows `faults` belongs to a process of its own, its --help included.
app.command(
    "faults",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(faults_command)
app.add_typer(convert_app, name="convert")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"glmv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train GLM-4.5V on FSDP2, and prove that the training is right."""


def main() -> None:
    """Run the command line."""
    try:
        app()
    except GlmvError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)

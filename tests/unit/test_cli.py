"""The command line as a whole."""

from typer.testing import CliRunner

from glmv import __version__
from glmv.cli import app


def test_the_version_needs_no_command():
    said = CliRunner().invoke(app, ["--version"])
    assert (said.exit_code, said.stdout) == (0, f"glmv {__version__}\n")

"""Puts the pinned torch_npu wheel into a side directory: never into the environment that torch lives in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from glmv.errors import GlmvError
from glmv.verify.wheel.once import made_once

PINNED = "2.13.0"
CACHE = Path("build/conformance")


class WheelUnavailable(GlmvError):
    """The wheel cannot be had here: no network, no such version for this Python, no pip."""


def install(version: str = PINNED, cache: Path = CACHE) -> Path:
    """The directory that holds torch_npu of this version; downloads and unpacks it once.

    Raises:
        WheelUnavailable: with pip's own last words.
    """
    site = _site(version, cache)
    if not site.is_dir():
        with made_once(site) as unfinished:
            pip_install(f"torch_npu=={version}", "--target", str(unfinished))
    return site


def installed_site(version: str = PINNED, cache: Path = CACHE) -> Path | None:
    """Where `install` has put the wheel; None before."""
    site = _site(version, cache)
    return site if site.is_dir() else None


def _site(version: str, cache: Path) -> Path:
    return cache.resolve() / f"torch_npu-{version}"


def pip_install(requirement: str, *options: str, python: str = sys.executable) -> None:
    """`pip install --no-deps`, quietly.

    Raises:
        WheelUnavailable: pip failed.
    """
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", *options]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise WheelUnavailable(f"{requirement} cannot be installed: {words[-1] if words else 'pip said nothing'}")

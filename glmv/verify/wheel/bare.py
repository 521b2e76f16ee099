"""`make bare-npu`: torch_npu installed beside torch, and no CANN. Everything that needs no NPU works as before.

A second environment is made in build/: it sees all packages of this one, and has torch_npu installed as well.
Exit code 0: all steps went as they must, or SKIPPED because the wheel cannot be had here. 1: a step went wrong.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from glmv.errors import GlmvError
from glmv.npu_package import AUTOLOAD
from glmv.verify.wheel.install import PINNED, WheelUnavailable, pip_install
from glmv.verify.wheel.once import made_once

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = Path("build/bare-npu")
REASON = "libhccl.so"  # the vendor library whose absence the wheel meets first

Checked = Callable[[subprocess.CompletedProcess[str]], bool]


@dataclass(frozen=True)
class Step:
    """A command of the environment's Python, and what must become of it."""

    name: str
    command: tuple[str, ...]
    expected: Checked = lambda done: done.returncode == 0


def steps(work: Path) -> list[Step]:
    """What is tried, one after another; later ones use files of earlier ones."""
    tiny, dcp, out = (str(work / name) for name in ("tiny", "dcp", "out"))
    train = (
        "-m", "glmv", "train", "examples/pictures/train.yaml", "training.train_iters=2",
        f"training.save={out}", f"training.load={dcp}", f"model.model_name_or_path={dcp}",
        f"data.dataset_param.preprocess_parameters.model_name_or_path={tiny}",
    )  # fmt: skip
    return [
        Step("import torch fails", ("-c", "import torch"), lambda done: done.returncode != 0 and REASON in done.stderr),
        Step("import glmv, torch", ("-c", "import glmv, torch")),
        Step("import transformers' model", ("-c", "import glmv; from transformers import Glm4vMoeModel")),
        Step("glmv --help", ("-m", "glmv", "--help")),
        Step("glmv doctor says why", ("-m", "glmv", "doctor", "--json"), _names_reason),
        Step("glmv make-tiny", ("-m", "glmv", "make-tiny", tiny)),
        Step("glmv convert", ("-m", "glmv", "convert", "hf-to-dcp", "--hf-dir", tiny, "--save-dir", dcp)),
        Step("glmv train --device cpu", (*train, "--device", "cpu")),
        Step("glmv train --device npu says why", (*train, "--device", "npu"), _refuses_with_reason),
        Step("tests of the cpu", (*PYTEST, *CPU_TESTS)),
        Step("tests of the emulated npu", (*PYTEST, *NPU_TESTS), _emulated),
    ]


PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
CPU_TESTS = (
    "tests/unit/config",
    "tests/unit/ops/test_experts.py",
    "tests/unit/ops/test_attention.py",
    "tests/unit/parallel/test_process.py",
    "tests/unit/spec/test_witness_hf.py",
)


NPU_TESTS = ("-m", "npu", "-k", "swiglu", "tests/npu/test_operators.py")


def _emulated(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode == 0 and "EMULATED" in done.stdout


def _names_reason(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode == 0 and REASON in done.stdout


def _refuses_with_reason(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode == 2 and REASON in done.stderr and "Traceback" not in done.stderr


def make_environment(directory: Path) -> Path:
    """The Python of an environment that has torch_npu and sees this one's packages; made once.

    Raises:
        WheelUnavailable: torch_npu cannot be installed.
    """
    if not directory.is_dir():
        with made_once(directory) as unfinished:
            venv.create(unfinished, symlinks=True)
            own = Path(sysconfig.get_path("purelib", vars={"base": str(unfinished), "platbase": str(unfinished)}))
            pip_install(f"torch_npu=={PINNED}", "--target", str(own))
            # Lines of a .pth file are directories to search behind the environment's own.
            lines = [sysconfig.get_path("purelib"), str(ROOT)]
            (own / "main_environment.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return directory / "bin/python"


def main() -> int:
    """Make the environment and try every step; returns the exit code."""
    if _has_cann():
        print("bare-npu: SKIPPED, nothing was checked: CANN is on this machine")
        return 0
    try:
        python = make_environment(ENVIRONMENT.resolve())
    except WheelUnavailable as error:
        print(f"bare-npu: SKIPPED, nothing was checked: {error}")
        return 0
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="glmv-bare-") as work:
        wrong = [step.name for step in steps(Path(work)) if not _goes_well(step, python)]
    verdict = f"FAILED: {', '.join(wrong)}" if wrong else "PASSED"
    print(f"torch_npu {PINNED} without CANN: {verdict} in {time.monotonic() - begin:.0f} s")
    return int(bool(wrong))


def _goes_well(step: Step, python: Path) -> bool:
    environ = {key: value for key, value in os.environ.items() if key not in (AUTOLOAD, "PYTHONPATH")}
    begin = time.monotonic()
    command = [str(python), *step.command]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False)
    well = step.expected(done)
    print(f"  {'ok ' if well else 'RED'}  {step.name:<36} {time.monotonic() - begin:5.1f} s", flush=True)
    if not well:
        print(f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return well


def _has_cann() -> bool:
    try:
        ctypes.CDLL(REASON)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GlmvError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)

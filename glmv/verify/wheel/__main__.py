"""`make conformance`: the contract of the NPU's operators against the real torch_npu wheel.

Exit code 0: no difference, or SKIPPED because the wheel cannot be had here (the last line says which). 1: a difference.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from glmv.errors import GlmvError
from glmv.verify.wheel.install import CACHE, PINNED, WheelUnavailable, install
from glmv.verify.wheel.session import Report, Session
from glmv.verify.wheel.stand_ins import build, missing_tools

REPORT = Path("build/conformance.json")
FEWEST_CASES = 2000
TESTS = Path(__file__).resolve().parents[3] / "tests/conformance"


def main() -> int:
    """Install, build, record a training step, run the tests in a child process, and sum up."""
    if missing := missing_tools():
        return skipped(f"{', '.join(missing)} not found; install gcc and binutils")
    try:
        site = install()
    except WheelUnavailable as error:
        return skipped(str(error))
    build(site)
    REPORT.unlink(missing_ok=True)
    begin = time.monotonic()
    session = Session(site, recorded_step(CACHE.resolve() / "recording.json"), REPORT.resolve())
    command = [sys.executable, "-m", "pytest", "-q", "-m", "conformance", "-p", "no:cacheprovider", str(TESTS)]
    code = subprocess.run(command, env=session.environment(), check=False).returncode
    return summed_up(code, session, time.monotonic() - begin)


def skipped(reason: str) -> int:
    """Say so, and be green: a machine without a network is no fault of the contract."""
    print(f"conformance with torch_npu {PINNED}: SKIPPED, nothing was checked: {reason}")
    return 0


def recorded_step(path: Path) -> Path | None:
    """Where one training step on the emulated npu is recorded, made anew; None without a C++ compiler for that.

    If the step fails, its last words are printed, and the file is missing: the test that wants it is red.
    """
    path.unlink(missing_ok=True)
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        print("conformance: no C++ compiler, so no training step is recorded and replayed")
        return None
    command = [sys.executable, "-m", "glmv.verify.wheel.record", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"conformance: the training step on the emulated npu fails:\n{done.stderr[-4000:]}")
    return path


def summed_up(code: int, session: Session, seconds: float) -> int:
    """Print the numbers of the report; returns the exit code."""
    if not session.report.exists():
        print(f"conformance with torch_npu {PINNED}: FAILED before anything was compared")
        return 1
    report = Report.read(session.report)
    cases = sum(report.meta_cases.values())
    too_few = cases < FEWEST_CASES or (session.recording is not None and not report.replayed_calls)
    verdict = "FAILED" if code or too_few or report.mismatches else "PASSED"
    print(
        f"conformance with torch_npu {report.torch_npu}: {verdict} in {seconds:.0f} s: {report.schemas} schemas, "
        f"{cases} cases against meta kernels (at least {FEWEST_CASES} are due), "
        f"{sum(report.autograd_cases.values())} gradients, {sum(report.replayed_calls.values())} replayed calls, "
        f"{len(report.mismatches)} mismatches; without meta kernel: {', '.join(report.without_meta_kernel) or 'none'}"
    )
    return int(verdict == "FAILED")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GlmvError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)

"""Sessions within the test: pytest on a file of `sessions/`, with a template that all of them share."""

import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest

from glmv.verify.testing.template import ADDRESS, Template

SESSIONS = Path(__file__).parent / "sessions"
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Case:
    """One test of a session: "passed", "skipped", "failure" or "error", and what was said about it."""

    outcome: str
    said: str


@dataclass(frozen=True)
class Session:
    exit_code: int
    printed: str
    cases: dict[str, Case]
    properties: dict[str, str]


def hear_interrupts() -> None:
    """What a shell starts in the background inherits deafness to SIGINT; a session at a terminal hears it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Sessions:
    """Starts sessions."""

    def __init__(self, address: str, directory: Path) -> None:
        self.environment = {**os.environ, ADDRESS: address, "OMP_NUM_THREADS": "1"}
        self.directory = directory

    def start(self, file: str, *arguments: str, launcher: tuple[str, ...] = (), **environment: str) -> subprocess.Popen:
        command = [
            sys.executable,
            *launcher,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            str(SESSIONS / file),
            *arguments,
        ]
        command.insert(1, "-u")
        return subprocess.Popen(
            command, cwd=ROOT, env=self.environment | environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=hear_interrupts,
        )  # fmt: skip

    def wait(self, process: subprocess.Popen) -> str:
        """What a session prints until it ends; none outlives the test's time limit."""
        try:
            return process.communicate()[0]
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)

    def run(self, file: str, *arguments: str, **settings) -> Session:
        report = self.directory / f"{time.monotonic_ns()}.xml"
        process = self.start(file, f"--junitxml={report}", *arguments, **settings)
        printed = self.wait(process)
        return Session(process.returncode, printed, read_cases(report), read_properties(report))


def read_cases(report: Path) -> dict[str, Case]:
    """The cases of a JUnit file by test name."""
    if not report.exists():
        return {}
    cases = {}
    for case in ElementTree.parse(report).iter("testcase"):
        ends = [child for child in case if child.tag in ("failure", "error", "skipped")]
        said = "\n".join(f"{end.get('message')}\n{end.text}" for end in ends)
        outcome = ends[0].tag if ends else "passed"
        cases[case.get("name")] = Case(outcome, said)
    return cases


def read_properties(report: Path) -> dict[str, str]:
    """What a JUnit file says of the whole session."""
    if not report.exists():
        return {}
    found = ElementTree.parse(report).iterfind("testsuite/properties/property")
    return {element.get("name"): element.get("value") for element in found}


@pytest.fixture(scope="session")
def sessions(tmp_path_factory):
    if ADDRESS in os.environ:
        yield Sessions(os.environ[ADDRESS], tmp_path_factory.mktemp("sessions"))
        return
    template = Template()
    yield Sessions(template.address, tmp_path_factory.mktemp("sessions"))
    template.stop()

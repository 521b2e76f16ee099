"""The emulated device lives in child processes; their answers are shared by all tests of this directory."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILDREN = Path(__file__).parent / "children"
RANKS = 2


def start(script, *arguments):
    """A child process of one thread: several ranks share few cores."""
    command = [sys.executable, str(CHILDREN / script), *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def facts(child):
    """What a child found out; it does not outlive the test's time limit."""
    try:
        output, errors = child.communicate()
    finally:
        child.kill()
    assert child.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """`once(name, produce)`: the answer of `produce`, asked for by one of xdist's workers for all of them."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def ask(name, produce):
        file = shared / f"emulated-npu-{name}.json"
        with (shared / f"emulated-npu-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                file.write_text(json.dumps(produce()))
        return json.loads(file.read_text())

    return ask


@pytest.fixture(scope="session")
def device_facts(once):
    return once("device", lambda: facts(start("device.py")))


@pytest.fixture(scope="session")
def operator_facts(once):
    return once("operators", lambda: facts(start("operators.py")))


@pytest.fixture(scope="session")
def rank_facts(once, tmp_path_factory):
    """One dict of facts for each rank."""

    def ask_ranks():
        directory = tmp_path_factory.mktemp("ranks")
        children = [start("ranks.py", rank, directory) for rank in range(RANKS)]
        return [facts(child) for child in children]

    return once("ranks", ask_ranks)

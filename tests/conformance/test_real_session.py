"""`pytest -m npu --npu real` on the real torch_npu: ranks find its device; kernels are what the stand-ins lack."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from glmv.verify.wheel.load import SETTINGS
from glmv.verify.wheel.stand_ins import build

pytestmark = pytest.mark.conformance

# Every process of the session finds CANN and torch_npu as if they were installed.
SITE = """
import ctypes, sys
for library in {libraries}:
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
sys.path.append({site!r})
"""
TESTS = """
import pytest, torch

@pytest.mark.npu
def test_a_device_alone(device):
    assert torch.arange(3).to(device).cpu().tolist() == [0, 1, 2]

@pytest.mark.npu
def test_a_process_group(process):
    import torch_npu
    assert process.device == torch.device("npu", 0)
    assert torch_npu._C._npu_getOption("jitCompile") == b"disable"
"""


def test_single_devices_are_found_and_named(session, tmp_path):
    libraries = [str(library) for library in build(session.site)]
    (tmp_path / "sitecustomize.py").write_text(SITE.format(libraries=libraries, site=str(session.site)))
    (tmp_path / "test_real.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    command = [sys.executable, "-m", "pytest", "-p", "glmv.verify.testing.plugin", "--npu", "real", str(tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **SETTINGS, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "npu: 1 x Ascend910B" in done.stdout

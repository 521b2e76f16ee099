"""torch_npu installed without CANN: the CPU keeps working, and the reason is named (see `glmv/npu_package.py`)."""

import pytest
from broken_torch_npu import SAID, install_broken, run_python

from glmv import npu_package

CHOOSE = "import glmv; from glmv.parallel.process import choose_device; print(choose_device({!r}, 0))"


@pytest.fixture
def broken(tmp_path):
    """Runs code where a broken torch_npu is installed."""
    install_broken(tmp_path)
    return lambda code: run_python("-c", code, site=tmp_path)


def test_torch_alone_dies_there(broken):
    assert "Failed to load the backend extension: torch_npu" in broken("import torch").stderr


@pytest.mark.parametrize(
    "code", ["import glmv, torch", "import glmv; from transformers import Glm4vMoeForConditionalGeneration"]
)
def test_what_needs_no_npu_is_imported(broken, code):
    done = broken(code)
    assert done.returncode == 0, done.stderr


def test_the_command_line_imports_neither_torch_nor_transformers(broken):
    code = "import sys, glmv.cli; print({'torch', 'transformers', 'torch_npu'} & set(sys.modules))"
    assert broken(code).stdout == "set()\n"


def test_an_npu_is_refused_with_the_reason(broken):
    done = broken(CHOOSE.format("npu"))
    assert "LaunchError: device npu was asked for, but torch_npu is installed but cannot be imported" in done.stderr
    assert SAID in done.stderr


def test_auto_goes_on_without_and_says_so(broken):
    done = broken(CHOOSE.format("auto"))
    assert done.stdout in ("cpu\n", "cuda:0\n")
    assert SAID in done.stderr
    assert "set_env.sh" in done.stderr


def test_an_own_choice_of_autoload_is_kept(broken):
    code = "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '1'; import glmv; import torch"
    assert "Failed to load the backend extension" in broken(code).stderr


def test_other_failures_of_the_package_are_named_too():
    assert npu_package.describe(OSError("undefined symbol:\n  _ZN3c10")) == (
        "torch_npu is installed but cannot be imported: undefined symbol: _ZN3c10"
    )

"""What a rank says that may have a seeded fault."""

import subprocess
import sys

import pytest
import torch

SHIFT = "import glmv.ops.loss, torch; print(glmv.ops.loss.shift(torch.tensor([[1, 2]])).tolist())"


@pytest.mark.world_size(1)
def test_labels_are_shifted():
    from glmv.ops.loss import shift

    assert shift(torch.tensor([[1, 2]])).tolist() == [[2, -100]]


@pytest.mark.world_size(1)
def test_labels_are_shifted_behind_a_launcher():
    launcher = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {SHIFT!r}]).returncode)"
    ended = subprocess.run([sys.executable, "-c", launcher], capture_output=True, text=True)
    assert ended.stdout == "[[2, -100]]\n", ended.stderr

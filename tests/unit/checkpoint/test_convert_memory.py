"""Converting needs memory for a layer's experts, not for the model."""

import os
import subprocess
import sys

import pytest

from glmv.tiny.make import make_tiny

# One layer's stacked experts are 9 MB here.
TEXT = {"hidden_size": 256, "moe_intermediate_size": 352, "n_routed_experts": 16}
ONE_LAYER = 16 * 3 * 256 * 352 * 2
# The peak of a process never falls: if the larger model, which comes second, needs more, it shows.
SCRIPT = """
import re, sys
from pathlib import Path
from glmv.checkpoint.dcp_to_hf import dcp_to_hf
from glmv.checkpoint.hf_to_dcp import hf_to_dcp

base = Path(sys.argv[1])
for size in ("few", "many"):
    hf_to_dcp(base / size, base / f"{size} dcp")
    dcp_to_hf(base / f"{size} dcp", base / f"{size} export")
    # Not ru_maxrss: that counts the process that started this one, too.
    print(1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]))
"""


@pytest.fixture
def two_sizes(tmp_path):
    for size, layers in {"few": 3, "many": 7}.items():
        overrides = {"text_config": TEXT | {"num_hidden_layers": layers}, "vision_config": {"out_hidden_size": 256}}
        make_tiny(tmp_path / size, config_overrides=overrides, max_shard_bytes=6_000_000)
    return tmp_path


def test_peak_memory_does_not_grow_with_the_layers(two_sizes):
    # Freed memory goes back to the system, so that the figure is the converter's and not the allocator's.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "100000"}
    command = [sys.executable, "-c", SCRIPT, two_sizes]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    few, many = map(int, ended.stdout.split())
    assert many - few < ONE_LAYER  # of the 4 that the larger model has more

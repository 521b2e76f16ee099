"""A torch_npu that is installed and cannot be imported, as on every machine without CANN."""

import os
import subprocess
import sys

SAID = "libhccl.so: cannot open shared object file: No such file or directory"


def install_broken(site):
    """Put the package, with the metadata that makes torch import it, into a directory."""
    package, metadata = site / "torch_npu", site / "torch_npu-2.13.0.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").write_text(f"raise ImportError({SAID!r})\n", encoding="utf-8")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n", encoding="utf-8")


def run_python(*arguments, site):
    """A finished Python process that finds `site` and leaves torch's autoload as it is by default."""
    environ = {key: value for key, value in os.environ.items() if key != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True, check=False)

"""Settings that must hold before torch is imported in any test process."""

import os

# With several ranks on few cores, torch's default threading is tens of times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

pytest_plugins = ["glmv.verify.testing.plugin"]

"""Records which operators one training step of the tiny model calls on the emulated npu, and with what.

    python -m glmv.verify.wheel.record recording.json

In a process of its own: the emulated device takes the name `npu` for good.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from glmv.verify.wheel.recording import RecordedCall, write_recording

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "examples/pictures/train.yaml"


def overrides(work: Path) -> list[str]:
    """One step of one micro-batch, with every kernel that an NPU has of its own."""
    return [
        f"data.dataset_param.preprocess_parameters.model_name_or_path={work / 'hf'}",
        f"data.dataset_param.basic_parameters.dataset={ROOT / 'examples/pictures/conversations.json'}",
        f"model.model_name_or_path={work / 'dcp'}",
        f"training.load={work / 'dcp'}",
        f"training.save={work / 'out'}",
        "model.attn_implementation=flash_attention_2",
        "parallel.ep_plan.use_npu_fused_ops=true",
        "training.gradient_accumulation_steps=1",
        "training.train_iters=1",
    ]


def record(path: Path) -> int:
    """Train the one step, write its calls to `path`, and return how many they are."""
    from glmv.checkpoint.hf_to_dcp import hf_to_dcp
    from glmv.config import load_config
    from glmv.parallel.process import process_group
    from glmv.tiny.make import make_tiny
    from glmv.verify.emulated_npu import count, install

    install()
    with tempfile.TemporaryDirectory(prefix="glmv-record-") as directory:
        work = Path(directory)
        hf_to_dcp(make_tiny(work / "hf"), work / "dcp")
        config = load_config(CONFIG, overrides(work))
        with process_group("npu"), count(record=True) as counted:
            from glmv.train.trainer import Trainer

            Trainer(config).run()
    write_recording((RecordedCall(call.name, call.args, call.kwargs) for call in counted.recorded), path)
    return len(counted.recorded)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{record(Path(sys.argv[1]))} calls recorded")

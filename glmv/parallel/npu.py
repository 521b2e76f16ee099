"""What an NPU must be told before the first tensor is on it."""

import torch


def set_up() -> None:
    """Plain memory formats and kernels that are compiled ahead, for this process.

    With torch_npu's defaults `Module.to("npu")` may rewrite weights in a private format, which FSDP2 cannot shard, and
    every new shape of a batch waits for a compiler. Deterministic collectives and kernels are `training.use_deter_comp`
    (`glmv.train.seed`): HCCL reads its setting when the first collective makes its communicator.
    """
    npu = torch.get_device_module("npu")
    npu.config.allow_internal_format = False
    npu.set_compile_mode(jit_compile=False)

"""The gated activation of experts, by npu_swiglu."""
# Shapes: R rows, I intermediate, F = 2I (gate half first).

import torch
from torch import Tensor

from glmv.ops.npu.library import torch_npu


def swiglu_of_halves(gate_up_RF: Tensor) -> Tensor:
    """`silu(gate) * up` -> [R, I] of one tensor that holds both: neither half is copied; fp32 inside, rounded once."""
    if gate_up_RF.shape[0] == 0:  # npu_swiglu refuses an empty tensor
        gate_RI, up_RI = gate_up_RF.chunk(2, dim=-1)
        return torch.mul(gate_RI, up_RI)
    return torch_npu().npu_swiglu(gate_up_RF, dim=-1)

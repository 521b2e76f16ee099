"""RMSNorm by npu_rms_norm."""

import torch
from torch import Tensor

from glmv.ops.kernels import Kernels
from glmv.ops.norm import rms_norm
from glmv.ops.npu.library import fits, on_npu, torch_npu, why_not_dtype


def can_norm(hidden: Tensor, weight_H: Tensor, eps: float, *, kernels: Kernels) -> bool:
    """Whether the fused norm was asked for and takes these tensors."""
    if not (on_npu(hidden) and kernels.fused):
        return False
    why = why_not_dtype(hidden, weight_H)
    if weight_H.dtype not in (hidden.dtype, torch.float32):
        why = why or "its weight is narrower than its input"
    return fits("npu_rms_norm", why)


@rms_norm.register("npu", when=can_norm)
def rms_norm_npu(hidden: Tensor, weight_H: Tensor, eps: float, *, kernels: Kernels) -> Tensor:
    """All in fp32, rounded once, to hidden's dtype.

    The implementation in PyTorch, like Hugging Face's, rounds the quotient before the weight multiplies: in bf16 the
    two are one or two units in the last place apart. The weight's gradient is summed in fp32.
    """
    return torch_npu().npu_rms_norm(hidden, weight_H, epsilon=eps)[0]

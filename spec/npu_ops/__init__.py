"""The law of the torch_npu operators that the machine calls.

Every operator is written from its documentation and its kernel's source: what it refuses, what it computes with which
rounding, and its gradient. In float64 the same code is the truth that a real NPU is held against.
"""

from spec.npu_ops.alltoall import ALLTOALLV_GMM, GMM_ALLTOALLV
from spec.npu_ops.attention import ATTENTION
from spec.npu_ops.attention_grad import ATTENTION_GRAD
from spec.npu_ops.contract import Contract
from spec.npu_ops.gating import GATING, GATING_BACKWARD
from spec.npu_ops.grouped_matmul import GROUPED_MATMUL
from spec.npu_ops.permute import PERMUTE, PERMUTE_GRAD
from spec.npu_ops.refuse import Refused
from spec.npu_ops.ring import RING_ATTENTION_UPDATE
from spec.npu_ops.rms_norm import RMS_NORM, RMS_NORM_BACKWARD
from spec.npu_ops.rotary import ROTARY_MUL, ROTARY_MUL_BACKWARD
from spec.npu_ops.swiglu import SWIGLU, SWIGLU_BACKWARD
from spec.npu_ops.unpermute import UNPERMUTE, UNPERMUTE_GRAD

OPERATORS: dict[str, Contract] = {
    contract.name: contract
    for contract in [
        PERMUTE,
        PERMUTE_GRAD,
        UNPERMUTE,
        UNPERMUTE_GRAD,
        GROUPED_MATMUL,
        SWIGLU,
        SWIGLU_BACKWARD,
        ROTARY_MUL,
        ROTARY_MUL_BACKWARD,
        RMS_NORM,
        RMS_NORM_BACKWARD,
        ATTENTION,
        ATTENTION_GRAD,
        RING_ATTENTION_UPDATE,
        GATING,
        GATING_BACKWARD,
        ALLTOALLV_GMM,
        GMM_ALLTOALLV,
    ]
}

__all__ = ["OPERATORS", "Contract", "Refused"]

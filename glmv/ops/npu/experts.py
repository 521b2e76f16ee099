"""The experts' MLPs as grouped matmuls of the NPU."""
# Shapes: R rows in expert order, H hidden, E experts, I intermediate, F = 2I (gate half first).

from torch import Tensor

from glmv.ops.experts import expert_mlp
from glmv.ops.kernels import Kernels
from glmv.ops.npu.grouped_matmul import grouped_matmul, why_unsupported
from glmv.ops.npu.library import fits, on_npu
from glmv.ops.npu.swiglu import swiglu_of_halves


def can_group(rows_RH: Tensor, counts_E: Tensor, gate_up_EHF: Tensor, down_EIH: Tensor, *, kernels: Kernels) -> bool:
    """Whether the NPU's grouped matmul was asked for and takes these experts."""
    if not (on_npu(rows_RH) and kernels.fused and kernels.grouped):
        return False
    return fits("npu_grouped_matmul", why_unsupported(gate_up_EHF) or why_unsupported(down_EIH))


@expert_mlp.register("npu", when=can_group)
def grouped_mlp_npu(
    rows_RH: Tensor, counts_E: Tensor, gate_up_EHF: Tensor, down_EIH: Tensor, *, kernels: Kernels
) -> Tensor:
    """Two grouped matmuls around one SwiGLU; no host synchronisation."""
    hidden_RI = swiglu_of_halves(grouped_matmul(rows_RH, gate_up_EHF, counts_E))
    return grouped_matmul(hidden_RI, down_EIH, counts_E)

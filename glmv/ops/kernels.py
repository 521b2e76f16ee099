"""Which implementations a model asks for; each operator decides by device and dtype whether it can give them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kernels:
    """The three switches of a config that choose kernels; results are the same but for rounding.

    Attributes:
        grouped: `model.use_grouped_expert_matmul`: one kernel for all experts instead of a loop.
        attention: `model.attn_implementation`, one of `glmv.ops.attention.IMPLEMENTATIONS`.
        fused: `parallel.ep_plan.use_npu_fused_ops`: on an NPU its own kernels for permutation, grouped matmul, SwiGLU,
            rotary embedding and RMSNorm. Attention has its own switch.
    """

    grouped: bool = True
    attention: str = "sdpa"
    fused: bool = True

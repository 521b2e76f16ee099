"""Implementations by torch_npu's fused operators, registered on the operators of `glmv.ops`.

They are chosen for tensors on an NPU; what an operator there cannot take goes to the implementation in PyTorch.
torch_npu itself is imported by the first call (`glmv.ops.npu.library`).
"""

import glmv.ops.npu.attention
import glmv.ops.npu.attention_block
import glmv.ops.npu.experts
import glmv.ops.npu.norm
import glmv.ops.npu.permute
import glmv.ops.npu.rope  # noqa: F401 - importing registers them

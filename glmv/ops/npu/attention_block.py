"""Blocks of ring attention by npu_fusion_attention.

The kernel tells the maximum of each query's scores and the sum of exp(score - maximum); lse = maximum + log(sum). Its
gradient takes both again, and (lse, 1) says the same as (maximum, sum).
"""
# Shapes: B batch, N heads, S queries, K keys, D head dim.

from torch import Tensor

from glmv.ops.attention_block import attend_block, attend_block_backward
from glmv.ops.npu.attention import OPERATOR, sight, why_not
from glmv.ops.npu.library import fits, on_npu, torch_npu

LAYOUT = "BNSD"
COPIES = 8  # the kernel repeats each statistic so many times


def can_attend_block(
    query_BNSD: Tensor, key_BNKD: Tensor, value_BNKD: Tensor, *, causal: bool, implementation: str
) -> bool:
    """Whether the device's fused kernel was asked for and takes these tensors."""
    if not (on_npu(query_BNSD) and implementation == "flash"):
        return False
    return fits(f"{OPERATOR} (ring)", why_not(query_BNSD, value_BNKD))


@attend_block.register("npu", when=can_attend_block)
def npu_block(
    query_BNSD: Tensor, key_BNKD: Tensor, value_BNKD: Tensor, *, causal: bool, implementation: str = "flash"
) -> tuple[Tensor, Tensor]:
    """Output in the query's dtype, lse [B, N, S] in fp32."""
    output, maximum, total, *_ = torch_npu().npu_fusion_attention(
        *(states.contiguous() for states in (query_BNSD, key_BNKD, value_BNKD)),
        query_BNSD.shape[1],
        LAYOUT,
        scale=query_BNSD.shape[-1] ** -0.5,
        **sight(causal, query_BNSD.device),
    )
    return output, maximum[..., 0] + total[..., 0].log()


@attend_block_backward.register(
    "npu",
    when=lambda grad, query, key, value, output, lse, **options: can_attend_block(query, key, value, **options),
)
def npu_block_backward(
    grad_BNSD: Tensor,
    query_BNSD: Tensor,
    key_BNKD: Tensor,
    value_BNKD: Tensor,
    output_BNSD: Tensor,
    lse_BNS: Tensor,
    *,
    causal: bool,
    implementation: str = "flash",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in the inputs' dtype, from the statistics over all keys."""
    maximum_BNS8 = lse_BNS[..., None].expand(*lse_BNS.shape, COPIES).contiguous()
    inputs = query_BNSD, key_BNKD, value_BNKD, grad_BNSD
    found = torch_npu().npu_fusion_attention_grad(
        *(states.contiguous() for states in inputs),
        query_BNSD.shape[1],
        LAYOUT,
        softmax_max=maximum_BNS8,
        softmax_sum=maximum_BNS8.new_ones(maximum_BNS8.shape),
        softmax_in=query_BNSD.new_empty(0),
        attention_in=output_BNSD.contiguous(),
        scale_value=query_BNSD.shape[-1] ** -0.5,
        **sight(causal, query_BNSD.device),
    )
    return found[0], found[1], found[2]

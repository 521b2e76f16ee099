"""Tokens to expert order and back, by npu_moe_token_permute and npu_moe_token_unpermute.

Both accumulate in fp32 in slot order and round once, in both directions, as the implementations in PyTorch do.
"""
# Shapes: T tokens, H hidden, K experts per token, E experts, R = T * K rows in expert order.

from torch import Tensor

from glmv.ops.experts import Order, Permuted, combine, permute
from glmv.ops.kernels import Kernels
from glmv.ops.npu.library import fits, on_npu, torch_npu, why_not_dtype
from glmv.ops.permute import count_tokens

MAX_TOP_K = 512
MAX_INDICES = 2**24 - 2  # they are sorted as fp32


def can_permute(hidden_TH: Tensor, top_k_index_TK: Tensor, num_experts: int, *, kernels: Kernels) -> bool:
    """Whether the fused permutation was asked for and takes these tokens."""
    # Without tokens there is nothing to gain, and no word of the vendor's on what would happen.
    if not (on_npu(hidden_TH) and kernels.fused and top_k_index_TK.numel()):
        return False
    why = why_not_dtype(hidden_TH)
    if top_k_index_TK.shape[1] > MAX_TOP_K or top_k_index_TK.numel() > MAX_INDICES:
        why = why or f"{top_k_index_TK.shape[0]} tokens with {top_k_index_TK.shape[1]} experts each are too many"
    return fits("npu_moe_token_permute", why)


@permute.register("npu", when=can_permute)
def permute_npu(hidden_TH: Tensor, top_k_index_TK: Tensor, num_experts: int, *, kernels: Kernels) -> Permuted:
    """Rows of one expert stay in token order. No host synchronisation."""
    rows_RH, inverse_R = torch_npu().npu_moe_token_permute(hidden_TH, top_k_index_TK)
    # int32, and the inverse of the sorting order: where each slot went.
    return Permuted(rows_RH, count_tokens(top_k_index_TK, num_experts), Order(inverse_R))


@combine.register("npu", when=lambda *args, kernels: args[2].order_R is None)
def combine_npu(rows_RH: Tensor, top_k_weight_TK: Tensor, order: Order, *, kernels: Kernels) -> Tensor:
    """The weighted sum of a token's rows, for rows that `permute_npu` sorted.

    The weights stay fp32 beside bf16 rows: the kernel takes the mix, and returns the dtype of the rows.
    """
    return torch_npu().npu_moe_token_unpermute(rows_RH, order.inverse_R, probs=top_k_weight_TK)

"""Token permutation of a mixture of experts: copies of tokens sorted by expert, and the weighted way back.

Source: op-plugin's documentation and tests of npu_moe_token_permute / npu_moe_token_unpermute, and the CANN kernels
MoeTokenPermute, MoeTokenUnpermute and their gradients.
"""

# Shapes: T tokens, H hidden, K experts per token, R <= T*K rows kept.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec.npu_ops.contract import Call, Contract, wide
from spec.npu_ops.refuse import check_dtype, refuse_if

# Indices are sorted as float32, which counts exactly up to here.
SORTABLE = 2**24 - 1


def permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Copy every token once per chosen expert, in expert order; equal experts stay in token order.

    Args:
        tokens: [T, H].
        indices: chosen experts, [T] or [T, K], int32 or int64.
        num_out_tokens: rows to keep: n > 0 at most n, 0 or None all, n < 0 all but the last |n|.
    Returns:
        rows [R, H], and int32 `sorted_indices` [T*K]: the row that slot k of token t went to, at t*K + k. It is the
        inverse of the sorting order and keeps its full length when rows are dropped.
    """
    order_R = indices.reshape(-1).argsort(stable=True)
    kept = rows_kept(order_R.numel(), num_out_tokens)
    return tokens[order_R[:kept] // top_k(indices)], order_R.argsort().to(torch.int32)


def top_k(indices: Tensor) -> int:
    """Experts per token."""
    return indices.size(1) if indices.dim() == 2 else 1


def rows_kept(rows: int, num_out_tokens: int | None) -> int:
    """How many of all rows come out."""
    asked = num_out_tokens or 0
    return min(asked, rows) if asked > 0 else rows + asked


def refuse_permute(call: Call) -> None:
    """What npu_moe_token_permute refuses."""
    tokens, indices = call.tokens, call.indices
    refuse_if(call.padded_mode, "npu_moe_token_permute: padded_mode = True is not supported")
    refuse_if(
        tokens.dim() != 2, f"The dims of input tokens should be 2 dimensional, but got {tokens.dim()}-dimensional."
    )
    refuse_if(
        indices.dim() not in (1, 2),
        f"The dims of input indices should be 2 or 1 dimensional, but got {indices.dim()}-dimensional.",
    )
    check_dtype("tokens", tokens)
    check_dtype("indices", indices, (torch.int32, torch.int64))
    refuse_if(indices.size(0) != tokens.size(0), "npu_moe_token_permute: tokens and indices differ in dim 0")
    refuse_if(top_k(indices) > 512, f"npu_moe_token_permute: topK is {top_k(indices)}, at most 512 are supported")
    refuse_if(indices.numel() >= SORTABLE, f"npu_moe_token_permute: at most {SORTABLE - 1} indices are supported")
    if indices.numel():
        low, high = indices.min().item(), indices.max().item()
        refuse_if(not 0 <= low <= high < SORTABLE, f"npu_moe_token_permute: indices must lie in [0, {SORTABLE})")
    refuse_if(
        rows_kept(indices.numel(), call.num_out_tokens) < 0, "npu_moe_token_permute: num_out_tokens drops too much"
    )


def permute_gradients(grads: Sequence[Tensor], call: Call, outputs: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """A token collects the gradients of its copies."""
    rows, dtype = call.tokens.size(0), call.tokens.dtype
    return {"tokens": permute_grad(grads[0], outputs[1], rows, dtype, top_k(call.indices))}


def permute_grad(
    grad_permuted_tokens: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,
    padded_mode: bool = False,
) -> Tensor:
    """Gradient of `tokens` [T, H]: the copies' gradients summed in float32 in slot order, rounded once."""
    place_TK = sorted_indices.view(tokens_size_0, num_topK)
    return gather_sum(grad_permuted_tokens, place_TK, None, wide(grad_permuted_tokens)).to(tokens_dtype)


def refuse_permute_grad(call: Call) -> None:
    """What npu_moe_token_permute_grad_v2 refuses."""
    refuse_if(call.padded_mode, "npu_moe_token_permute_grad_v2: padded_mode = True is not supported")
    check_dtype("grad_permuted_tokens", call.grad_permuted_tokens)
    check_dtype("sorted_indices", call.sorted_indices, (torch.int32,))
    refuse_if(
        call.sorted_indices.numel() != call.tokens_size_0 * call.num_topK,
        "npu_moe_token_permute_grad_v2: sorted_indices must have tokens_size_0 * num_topK elements",
    )


def gather_sum(rows_RH: Tensor, place_TK: Tensor, weight_TK: Tensor | None, dtype: torch.dtype) -> Tensor:
    """sum over k of rows[place[t, k]] * weight[t, k], slot by slot in `dtype`.

    A place behind the last row (a dropped token) adds nothing. A row whose weight is zero is never read, so that NaN or
    uninitialised memory in it does not spread.
    """
    total_TH = torch.zeros(place_TK.size(0), rows_RH.size(1), dtype=dtype)
    for k, place_T in enumerate(place_TK.long().unbind(1)):
        read_T = place_T < rows_RH.size(0)
        if weight_TK is not None:
            read_T &= weight_TK[:, k] != 0
        part_TH = rows_RH[place_T[read_T]].to(dtype)
        if weight_TK is not None:
            part_TH = part_TH * weight_TK[read_T, k, None].to(dtype)
        total_TH[read_T] += part_TH
    return total_TH


PERMUTE = Contract("npu_moe_token_permute", permute, refuse_permute, permute_gradients, non_differentiable=(1,))
PERMUTE_GRAD = Contract("npu_moe_token_permute_grad_v2", permute_grad, refuse_permute_grad)

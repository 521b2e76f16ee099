"""The weighted way back from expert order to token order; sources as in permute.py."""

# Shapes: T tokens, H hidden, K experts per token, R <= T*K rows.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec.npu_ops.contract import Call, Contract, wide
from spec.npu_ops.permute import gather_sum
from spec.npu_ops.refuse import check_dtype, refuse_if


def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    """sum over k of permuted_tokens[sorted_indices[t*K + k]] * probs[t, k], in float32, rounded once.

    Args:
        permuted_tokens: [R, H]; rows behind R that an index names count as zero.
        sorted_indices: int32 [T*K], as `npu_moe_token_permute` returns it.
        probs: [T, K], any float dtype. Without them K is 1: all T*K rows come back and nothing is summed.
        restore_shape: read in padded mode only.
    Returns:
        [T, H] in the dtype of `permuted_tokens`, whatever that of `probs`.
    """
    dtype = wide(permuted_tokens, probs)
    return gather_sum(permuted_tokens, places(sorted_indices, probs), probs, dtype).to(permuted_tokens.dtype)


def places(sorted_indices: Tensor, probs: Tensor | None) -> Tensor:
    """`sorted_indices` as [T, K]."""
    return sorted_indices.view(-1, 1) if probs is None else sorted_indices.view(probs.shape)


def refuse_unpermute(call: Call) -> None:
    """What npu_moe_token_unpermute refuses."""
    check_dtype("permuted_tokens", call.permuted_tokens)
    refuse_if(call.permuted_tokens.dim() != 2, "The dims of input permuted_tokens should be 2 dimensional.")
    refuse_shared("npu_moe_token_unpermute", call)


def refuse_shared(operator: str, call: Call) -> None:
    """What the operator and its gradient have in common."""
    refuse_if(call.padded_mode, f"{operator}: padded_mode = True is not supported")
    check_dtype("sorted_indices", call.sorted_indices, (torch.int32,))
    refuse_if(call.sorted_indices.dim() != 1, "The dims of input sorted_indices should be 1 dimensional.")
    check_dtype("probs", call.probs)
    if call.probs is not None:
        refuse_if(call.probs.dim() != 2, "The dims of input probs should be 2 dimensional.")
        refuse_if(
            call.probs.numel() != call.sorted_indices.numel(),
            f"{operator}: probs must have one element per element of sorted_indices",
        )


def unpermute_gradients(grads: Sequence[Tensor], call: Call, outputs: Tensor) -> dict[str, Tensor]:
    """Gradients of rows and weights."""
    rows = call.permuted_tokens
    grad_rows, grad_probs = unpermute_grad(
        grads[0], call.sorted_indices, rows.size(0), rows.dtype, call.probs, permuted_tokens=rows
    )
    return {"permuted_tokens": grad_rows} | ({} if grad_probs is None else {"probs": grad_probs})


def unpermute_grad(
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
    permuted_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `permuted_tokens` [R, H] and of `probs` [T, K] (None without `probs`).

    A row's gradient is grad * prob, a weight's the float32 dot product over H; both are rounded once. Rows that no slot
    points to get zero, and so do weights of dropped slots.
    """
    dtype = wide(grad_unpermuted_tokens, probs)
    grad_TH = grad_unpermuted_tokens.to(dtype)
    grad_RH = torch.zeros(permuted_tokens_size_0, grad_TH.size(1), dtype=permuted_tokens_dtype)
    grad_TK = None if probs is None else torch.zeros_like(probs)
    for k, place_T in enumerate(places(sorted_indices, probs).long().unbind(1)):
        read_T = place_T < permuted_tokens_size_0
        place, part = place_T[read_T], grad_TH[read_T]
        if probs is not None and grad_TK is not None and permuted_tokens is not None:
            grad_TK[read_T, k] = (permuted_tokens[place].to(dtype) * part).sum(-1).to(probs.dtype)
            part = part * probs[read_T, k, None].to(dtype)
        grad_RH[place] = part.to(permuted_tokens_dtype)
    return grad_RH, grad_TK


def refuse_unpermute_grad(call: Call) -> None:
    """What npu_moe_token_unpermute_grad_v2 refuses."""
    check_dtype("grad_unpermuted_tokens", call.grad_unpermuted_tokens)
    refuse_shared("npu_moe_token_unpermute_grad_v2", call)
    refuse_if(
        call.probs is not None and call.permuted_tokens is None,
        "npu_moe_token_unpermute_grad_v2: probs need permuted_tokens",
    )


UNPERMUTE = Contract("npu_moe_token_unpermute", unpermute, refuse_unpermute, unpermute_gradients)
UNPERMUTE_GRAD = Contract("npu_moe_token_unpermute_grad_v2", unpermute_grad, refuse_unpermute_grad)

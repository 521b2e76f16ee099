"""Attention of some queries to one block of keys, with the statistics by which blocks are put together.

A block kernel gives the softmax over its own keys alone and the log of the sum of exponentials (lse) behind it. `merge`
weighs the results of several blocks by their lse, which gives the softmax over all keys. Backward, a kernel is given
the lse and output over ALL keys: exp(score - lse) are then the whole softmax's probabilities, and the gradients of the
blocks add up.

A block is square and causal, or whole. A causal block that is not square would be ambiguous: kernels differ on which
corner they count from. So a query of a block always sees at least one key.
"""
# Shapes: B batch, N heads, S queries, K keys, D head dim.

from __future__ import annotations

import torch
from torch import Tensor

from glmv.ops.attention import repeat_heads
from glmv.ops.precision import at_least_fp32
from glmv.ops.registry import Operator

attend_block: Operator[..., tuple[Tensor, Tensor]] = Operator("attend_block")
attend_block_backward: Operator[..., tuple[Tensor, Tensor, Tensor]] = Operator("attend_block_backward")

MAX_CUDA_HEAD_DIM = 256


def merge(output: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both of two disjoint blocks.

    Args:
        output, more: [..., S, D] in a wide dtype.   lse, more_lse: [..., S]; -inf where a query saw nothing, which adds
            nothing and is no NaN, whatever `output` holds there.
    """
    # The larger exponent becomes 0, so that neither overflows.
    highest = torch.maximum(lse, more_lse)
    highest = highest.masked_fill(highest == float("-inf"), 0)
    weight, more_weight = (lse - highest).exp(), (more_lse - highest).exp()
    total = weight + more_weight
    share, more_share = ((part / total.masked_fill(total == 0, 1))[..., None] for part in (weight, more_weight))
    mixed = (output * share).masked_fill_(share == 0, 0)
    mixed += (more * more_share).masked_fill_(more_share == 0, 0)
    return mixed, highest + total.log()


def _scores(query_BNSD: Tensor, key_BNKD: Tensor, causal: bool) -> Tensor:
    scores_BNSK = query_BNSD @ key_BNKD.transpose(2, 3) * query_BNSD.shape[-1] ** -0.5
    if not causal:
        return scores_BNSK
    square = scores_BNSK.shape[-2:]
    assert square[0] == square[1], f"a causal block must be square, not {list(square)}"
    future_SS = torch.ones(square, dtype=torch.bool, device=query_BNSD.device).triu(1)
    return scores_BNSK.masked_fill(future_SS, float("-inf"))


@attend_block.register("eager", when=lambda *args, **options: True)
def eager_block(
    query_BNSD: Tensor, key_BNKD: Tensor, value_BNKD: Tensor, *, causal: bool, implementation: str = "eager"
) -> tuple[Tensor, Tensor]:
    """The textbook, in fp32 (float64 in float64): output [B, N, S, D] and lse [B, N, S].

    Args:
        key_BNKD, value_BNKD: may have fewer heads, each for several neighbouring query heads.
    """
    wide, heads = at_least_fp32(query_BNSD.dtype), query_BNSD.shape[1]
    key_BNKD, value_BNKD = (repeat_heads(states, heads).to(wide) for states in (key_BNKD, value_BNKD))
    scores_BNSK = _scores(query_BNSD.to(wide), key_BNKD, causal)
    lse_BNS = scores_BNSK.logsumexp(-1)
    return (scores_BNSK - lse_BNS[..., None]).exp() @ value_BNKD, lse_BNS


@attend_block_backward.register("eager", when=lambda *args, **options: True)
def eager_block_backward(
    grad_BNSD: Tensor,
    query_BNSD: Tensor,
    key_BNKD: Tensor,
    value_BNKD: Tensor,
    output_BNSD: Tensor,
    lse_BNS: Tensor,
    *,
    causal: bool,
    implementation: str = "eager",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from one block, in fp32 (float64 in float64).

    Args:
        output_BNSD, lse_BNS: over all keys that the queries see, not over this block's alone.
    """
    wide, heads, shared = at_least_fp32(query_BNSD.dtype), query_BNSD.shape[1], key_BNKD.shape[1]
    grad, query, output = (states.to(wide) for states in (grad_BNSD, query_BNSD, output_BNSD))
    key, value = (repeat_heads(states, heads).to(wide) for states in (key_BNKD, value_BNKD))
    probability_BNSK = (_scores(query, key, causal) - lse_BNS[..., None]).exp()
    through_BNS1 = (grad * output).sum(-1, keepdim=True)
    scores_BNSK = probability_BNSK * (grad @ value.transpose(2, 3) - through_BNS1) * query.shape[-1] ** -0.5
    per_head = scores_BNSK.transpose(2, 3) @ query, probability_BNSK.transpose(2, 3) @ grad
    key_grad, value_grad = (states.unflatten(1, (shared, -1)).sum(2) for states in per_head)
    return scores_BNSK @ key, key_grad, value_grad


def _on_cpu(query_BNSD: Tensor, implementation: str) -> bool:
    return query_BNSD.device.type == "cpu" and implementation != "eager"


@attend_block.register("cpu", when=lambda query, *kv, causal, implementation: _on_cpu(query, implementation))
def cpu_block(
    query_BNSD: Tensor, key_BNKD: Tensor, value_BNKD: Tensor, *, causal: bool, implementation: str = "flash"
) -> tuple[Tensor, Tensor]:
    """PyTorch's flash attention for CPUs; output in the query's dtype."""
    _check_square(query_BNSD, key_BNKD, causal)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query_BNSD, key_BNKD, value_BNKD, 0.0, causal)


@attend_block_backward.register(
    "cpu", when=lambda grad, query, *others, causal, implementation: _on_cpu(query, implementation)
)
def cpu_block_backward(
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
    """Gradients in the inputs' dtype."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_BNSD, query_BNSD, key_BNKD, value_BNKD, output_BNSD, lse_BNS, 0.0, causal
    )


def _on_cuda(query_BNSD: Tensor, implementation: str) -> bool:
    size = query_BNSD.shape[-1]
    fits = query_BNSD.dtype in (torch.bfloat16, torch.float16) and size % 8 == 0 and size <= MAX_CUDA_HEAD_DIM
    return query_BNSD.device.type == "cuda" and implementation != "eager" and fits


@attend_block.register("cuda", when=lambda query, *kv, causal, implementation: _on_cuda(query, implementation))
def cuda_block(
    query_BNSD: Tensor, key_BNKD: Tensor, value_BNKD: Tensor, *, causal: bool, implementation: str = "flash"
) -> tuple[Tensor, Tensor]:
    """PyTorch's flash attention for CUDA, 16-bit only; output in the query's dtype, lse in fp32."""
    _check_square(query_BNSD, key_BNKD, causal)
    found = torch.ops.aten._scaled_dot_product_flash_attention(query_BNSD, key_BNKD, value_BNKD, 0.0, causal)
    return found[0], found[1]


@attend_block_backward.register(
    "cuda", when=lambda grad, query, *others, causal, implementation: _on_cuda(query, implementation)
)
def cuda_block_backward(
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
    """Gradients in the inputs' dtype."""
    seed, offset = (torch.zeros(n, dtype=torch.uint64, device=query_BNSD.device) for n in (2, 0))  # of no dropout
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_BNSD,
        query_BNSD,
        key_BNKD,
        value_BNKD,
        output_BNSD,
        lse_BNS.contiguous(),
        None,  # no packed borders
        None,
        query_BNSD.shape[2],
        key_BNKD.shape[2],
        0.0,
        causal,
        seed,
        offset,
    )


def _check_square(query_BNSD: Tensor, key_BNKD: Tensor, causal: bool) -> None:
    sizes = query_BNSD.shape[2], key_BNKD.shape[2]
    assert not causal or sizes[0] == sizes[1], f"a causal block must be square, not {list(sizes)}"

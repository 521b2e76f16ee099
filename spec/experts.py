"""The routed experts, one at a time: every expert is a SwiGLU MLP over the tokens that chose it."""

# Shapes: T tokens, H hidden, K experts per token.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec.numerics import Policy, swiglu_mlp


def experts(
    hidden_TH: Tensor,
    top_k_index_TK: Tensor,
    top_k_weight_TK: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    policy: Policy,
) -> Tensor:
    """Weighted sum of the chosen experts' outputs [T, H]; summed in the wide dtype, rounded once.

    Args:
        gate, up: per expert [I, H].   down: per expert [H, I] (`experts.N.*_proj.weight`).
    """
    total_TH = torch.zeros(hidden_TH.shape, dtype=policy.wide)
    for expert, (gate_IH, up_IH, down_HI) in enumerate(zip(gate, up, down, strict=True)):
        token, slot = (top_k_index_TK == expert).nonzero(as_tuple=True)
        output = policy.widen(swiglu_mlp(hidden_TH[token], gate_IH, up_IH, down_HI, policy))
        total_TH = total_TH.index_add(0, token, output * policy.widen(top_k_weight_TK)[token, slot, None])
    return policy.round(total_TH)

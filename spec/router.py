"""GLM-4.5V's router: which experts a token visits, and with what weight.

Source: config keys `norm_topk_prob`, `routed_scaling_factor`, `n_group`, `topk_group`; aux-free routing of DeepSeek-V3
(arXiv 2412.19437, section 2.1.2).
"""

# Shapes: T tokens, H hidden, E routed experts, K experts per token, G expert groups.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec.config import TextConfig
from spec.numerics import Policy, linear


@dataclass(frozen=True)
class Routing:
    """One layer's choice: experts and weights per token, and the biased scores that were compared."""

    top_k_index_TK: Tensor
    top_k_weight_TK: Tensor
    choice_TE: Tensor

    def detach(self) -> Routing:
        """The same values without their graph."""
        return Routing(self.top_k_index_TK, self.top_k_weight_TK.detach(), self.choice_TE.detach())


def route(
    hidden_TH: Tensor,
    gate_EH: Tensor,
    bias_E: Tensor,
    config: TextConfig,
    policy: Policy,
    pinned_TK: Tensor | None = None,
) -> Routing:
    """Choose K experts for every token, in the wide dtype.

    Selection sees the biased scores; the weights that multiply expert outputs do not.

    Args:
        gate_EH: router weight.   bias_E: `e_score_correction_bias`, never trained by gradient.
        pinned_TK: expert choices to use instead of the router's own (near-ties fall differently under other rounding).
    """
    wide = Policy(policy.wide)
    score_TE = linear(hidden_TH, gate_EH, None, wide).sigmoid()
    choice_TE = mask_weak_groups(score_TE.detach() + bias_E.to(policy.wide), config)
    top_k_index_TK = choice_TE.topk(config.num_experts_per_tok, dim=-1).indices if pinned_TK is None else pinned_TK
    top_k_weight_TK = score_TE.gather(-1, top_k_index_TK)
    if config.norm_topk_prob:
        top_k_weight_TK = top_k_weight_TK / (top_k_weight_TK.sum(-1, keepdim=True) + 1e-20)
    return Routing(top_k_index_TK, top_k_weight_TK * config.routed_scaling_factor, choice_TE)


def mask_weak_groups(choice_TE: Tensor, config: TextConfig) -> Tensor:
    """-inf for experts outside a token's `topk_group` best groups; a group scores the sum of its two best experts."""
    if config.n_group == 1:
        return choice_TE
    choice_TGe = choice_TE.unflatten(-1, (config.n_group, -1))
    score_TG = choice_TGe.topk(2, dim=-1).values.sum(-1)
    strong_TG = torch.zeros_like(score_TG, dtype=torch.bool)
    strong_TG.scatter_(-1, score_TG.topk(config.topk_group, dim=-1).indices, True)
    return choice_TGe.masked_fill(~strong_TG[..., None], float("-inf")).flatten(-2)

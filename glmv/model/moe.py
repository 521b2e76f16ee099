"""The mixture-of-experts MLP: router, routed experts, shared experts.

Source: the model's config.json, and the aux-free routing of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
"""
# Shapes: B batch, S sequence, T tokens, H hidden, E experts, G groups, K experts per token, I intermediate, F = 2I.

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glmv.model.config import TextConfig
from glmv.model.layers import GatedMLP, KeepsFloat32
from glmv.ops.experts import expert_mlp, experts
from glmv.ops.kernels import Kernels
from glmv.ops.precision import at_least_fp32
from glmv.ops.registry import say_once


class Router(KeepsFloat32):
    """Chooses K experts for every token, in fp32 end to end (float64 in a float64 model).

    `e_score_correction_bias` is a persistent fp32 buffer: it is in the checkpoint, it moves the choice, it never
    multiplies an output and no gradient trains it.
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        dtype = at_least_fp32(torch.get_default_dtype())
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size, dtype=dtype))
        self.register_buffer("e_score_correction_bias", torch.empty(config.n_routed_experts, dtype=dtype))
        if config.norm_topk_prob and config.num_experts_per_tok == 1:
            say_once(
                "num_experts_per_tok = 1 with norm_topk_prob = true: the one weight of a token is always 1, "
                "so that the routers get no gradient from the loss"
            )

    def forward(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Returns top_k_index_TK (int64) and top_k_weight_TK (fp32).

        The choice sees biased scores, the weights are the unbiased ones: gradients reach them only.
        """
        dtype = at_least_fp32(hidden_TH.dtype)
        score_TE = F.linear(hidden_TH.to(dtype), self.weight.to(dtype)).sigmoid()
        top_k_index_TK = self.choose(score_TE.detach() + self.e_score_correction_bias.to(dtype))
        top_k_weight_TK = score_TE.gather(-1, top_k_index_TK)
        if self.config.norm_topk_prob:
            top_k_weight_TK = top_k_weight_TK / (top_k_weight_TK.sum(-1, keepdim=True) + 1e-20)
        return top_k_index_TK, top_k_weight_TK * self.config.routed_scaling_factor

    def choose(self, choice_TE: Tensor) -> Tensor:
        """Indices of the K best experts among the `topk_group` best groups (a group's score: sum of its best two)."""
        config = self.config
        if config.n_group > 1:
            grouped_TGM = choice_TE.unflatten(-1, (config.n_group, -1))
            group_score_TG = grouped_TGM.topk(2, dim=-1).values.sum(-1)
            kept_TG = torch.zeros_like(group_score_TG, dtype=torch.bool)
            kept_TG.scatter_(-1, group_score_TG.topk(config.topk_group, dim=-1).indices, True)
            # -inf, not 0: with a negative bias a masked 0 would beat every expert of the kept groups.
            choice_TE = grouped_TGM.masked_fill(~kept_TG[..., None], float("-inf")).flatten(-2)
        return choice_TE.topk(config.num_experts_per_tok, dim=-1).indices


class Experts(nn.Module):
    """The routed experts' weights, stacked: x @ gate_up_proj[e] (gate half first), then x @ down_proj[e].

    `dispatcher` is set from outside under expert parallelism: it runs the experts of all ranks that share them.
    """

    dispatcher: Callable[..., Tensor] | None = None

    def __init__(self, config: TextConfig, kernels: Kernels) -> None:
        super().__init__()
        size_E, size_H, size_I = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(size_E, size_H, 2 * size_I))
        self.down_proj = nn.Parameter(torch.empty(size_E, size_I, size_H))
        self.kernels = kernels

    def forward(self, hidden_TH: Tensor, top_k_index_TK: Tensor, top_k_weight_TK: Tensor) -> Tensor:
        """[T, H] -> [T, H] in the weights' dtype; the routing weights are used in fp32."""
        return experts(
            hidden_TH.to(self.gate_up_proj.dtype),
            top_k_index_TK,
            top_k_weight_TK,
            self.gate_up_proj,
            self.down_proj,
            self.kernels,
            self.dispatcher or expert_mlp,
        )


class MoE(nn.Module):
    """Routed experts plus the shared experts, which every token visits unweighted."""

    def __init__(self, config: TextConfig, kernels: Kernels) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config, kernels)
        self.shared_experts = GatedMLP(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        hidden_TH = hidden_BSH.flatten(0, 1)
        top_k_index_TK, top_k_weight_TK = self.gate(hidden_TH)
        routed_TH = self.experts(hidden_TH, top_k_index_TK, top_k_weight_TK)
        return routed_TH.view_as(hidden_BSH) + self.shared_experts(hidden_BSH)

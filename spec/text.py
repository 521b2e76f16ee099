"""The text decoder of GLM-4.5V.

Source: `text_config` of the published config.json; grouped-query attention with partial M-RoPE, pre-norm blocks, dense
SwiGLU in the first `first_k_dense_replace` layers and routed plus shared experts in the others.
"""

# Shapes: B batch, S sequence, T = B*S tokens, H hidden, K experts per token, V vocabulary.

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spec.config import TextConfig
from spec.experts import experts
from spec.numerics import Policy, attend, linear, rms_norm, swiglu_mlp
from spec.rope import rotate, text_cos_sin
from spec.router import Routing, route
from spec.scope import Scope


def decoder(
    hidden_BSH: Tensor,
    position_3BS: Tensor,
    document_BS: Tensor,
    weights: Scope,
    config: TextConfig,
    policy: Policy,
    pinned: Mapping[int, Tensor],
) -> tuple[Tensor, dict[int, Routing]]:
    """All layers and the final norm. Returns hidden states [B, S, H] and the routing of every MoE layer by its index.

    Args:
        document_BS: a token looks at its own document only; -1 is padding, which no token looks at.
        weights: scope `model.language_model`.
        pinned: expert choices [T, K] to use, by layer index.
    """
    cos_BSD, sin_BSD = text_cos_sin(position_3BS, config, policy)
    length = hidden_BSH.shape[1]
    same_BSS = (document_BS[:, :, None] == document_BS[:, None, :]) & (document_BS >= 0)[:, None, :]
    allowed_BSS = torch.ones(length, length, dtype=torch.bool).tril() & same_BSS
    routings: dict[int, Routing] = {}
    for index in range(config.num_hidden_layers):
        layer = weights / "layers" / index
        normed = rms_norm(hidden_BSH, layer["input_layernorm.weight"], config.rms_norm_eps, policy)
        hidden_BSH = hidden_BSH + attention(normed, cos_BSD, sin_BSD, allowed_BSS, layer / "self_attn", config, policy)
        normed = rms_norm(hidden_BSH, layer["post_attention_layernorm.weight"], config.rms_norm_eps, policy)
        if index < config.first_k_dense_replace:
            hidden_BSH = hidden_BSH + dense_mlp(normed, layer / "mlp", policy)
        else:
            output, routings[index] = moe(normed, layer / "mlp", config, policy, pinned.get(index))
            hidden_BSH = hidden_BSH + output
    return rms_norm(hidden_BSH, weights["norm.weight"], config.rms_norm_eps, policy), routings


def attention(
    hidden_BSH: Tensor,
    cos_BSD: Tensor,
    sin_BSD: Tensor,
    allowed_BSS: Tensor,
    weights: Scope,
    config: TextConfig,
    policy: Policy,
) -> Tensor:
    """Causal grouped-query attention; queries, keys and values have a bias, the output projection has none."""

    def heads(name: str) -> Tensor:
        projected = linear(hidden_BSH, weights[f"{name}.weight"], weights.get(f"{name}.bias"), policy)
        return projected.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)

    cos, sin = cos_BSD[:, None], sin_BSD[:, None]
    query, key, value = rotate(heads("q_proj"), cos, sin), rotate(heads("k_proj"), cos, sin), heads("v_proj")
    repeats = config.num_attention_heads // config.num_key_value_heads
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    output = attend(query, key, value, allowed_BSS[:, None], config.head_dim**-0.5, policy)
    return weights.told(linear(output.transpose(1, 2).flatten(-2), weights["o_proj.weight"], None, policy))


def dense_mlp(hidden: Tensor, weights: Scope, policy: Policy) -> Tensor:
    """A SwiGLU MLP under its published names."""
    gate, up, down = (weights[f"{name}_proj.weight"] for name in ("gate", "up", "down"))
    return weights.told(swiglu_mlp(hidden, gate, up, down, policy))


def moe(
    hidden_BSH: Tensor, weights: Scope, config: TextConfig, policy: Policy, pinned_TK: Tensor | None
) -> tuple[Tensor, Routing]:
    """Routed experts plus the shared expert, which every token visits with weight one."""
    hidden_TH = hidden_BSH.flatten(0, 1)
    gate = weights / "gate"
    routing = route(hidden_TH, gate["weight"], gate["e_score_correction_bias"], config, policy, pinned_TK)
    each = [weights / "experts" / expert for expert in range(config.n_routed_experts)]
    gates, ups, downs = ([expert[f"{name}_proj.weight"] for expert in each] for name in ("gate", "up", "down"))
    output_TH = experts(hidden_TH, routing.top_k_index_TK, routing.top_k_weight_TK, gates, ups, downs, policy)
    output_TH = (weights / "experts").told(output_TH) + dense_mlp(hidden_TH, weights / "shared_experts", policy)
    return output_TH.unflatten(0, hidden_BSH.shape[:2]), routing

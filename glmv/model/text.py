"""The text decoder: embeddings (text, image and video features), attention and MLP layers, final norm."""
# Shapes: B batch, S sequence, H hidden, N heads, D head dim, R rotary dim, M features.

from collections.abc import Callable

import torch
from torch import Tensor, nn

from glmv.model.config import TextConfig
from glmv.model.layers import Embedding, GatedMLP, Linear, RMSNorm
from glmv.model.moe import MoE
from glmv.model.rotary import TextRotary
from glmv.ops.attention import Visible, causal_mask, text_attention
from glmv.ops.kernels import Kernels
from glmv.ops.rope import rotate


class TextAttention(nn.Module):
    """Causal grouped-query attention; q, k, v have biases, o has none; RoPE turns the first R of D channels.

    `attend` is set from outside under context parallelism: it attends to tokens on other ranks too.
    """

    attend: Callable[..., Tensor] = staticmethod(text_attention)

    def __init__(self, config: TextConfig, kernels: Kernels) -> None:
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.kernels = kernels
        self.q_proj = Linear(hidden, config.num_attention_heads * head_dim, bias=config.attention_bias)
        self.k_proj = Linear(hidden, config.num_key_value_heads * head_dim, bias=config.attention_bias)
        self.v_proj = Linear(hidden, config.num_key_value_heads * head_dim, bias=config.attention_bias)
        self.o_proj = Linear(config.num_attention_heads * head_dim, hidden, bias=False)

    def forward(self, hidden_BSH: Tensor, cos_B1SR: Tensor, sin_B1SR: Tensor, visible: Visible) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        query, key, value = (
            project(hidden_BSH).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (rotate(states, cos_B1SR, sin_B1SR, kernels=self.kernels) for states in (query, key))
        output_BNSD = self.attend(query, key, value, visible, implementation=self.kernels.attention)
        return self.o_proj(output_BNSD.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x)). The first `first_k_dense_replace` layers have a dense MLP."""

    def __init__(self, config: TextConfig, index: int, kernels: Kernels) -> None:
        super().__init__()
        self.self_attn = TextAttention(config, kernels)
        self.mlp: GatedMLP | MoE
        if index < config.first_k_dense_replace:
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        else:
            self.mlp = MoE(config, kernels)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)

    def forward(self, hidden_BSH: Tensor, cos_B1SR: Tensor, sin_B1SR: Tensor, visible: Visible) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        hidden_BSH = hidden_BSH + self.self_attn(self.input_layernorm(hidden_BSH), cos_B1SR, sin_B1SR, visible)
        return hidden_BSH + self.mlp(self.post_attention_layernorm(hidden_BSH))


class TextModel(nn.Module):
    """Token ids and image features in, normalised hidden states out."""

    def __init__(self, config: TextConfig, kernels: Kernels) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index, kernels) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)
        self.rotary_emb = TextRotary(config)

    def forward(
        self,
        input_ids_BS: Tensor,
        features: dict[int, Tensor],
        types_BS: Tensor,
        position_ids_3BS: Tensor,
        visible: Visible,
    ) -> Tensor:
        """Hidden states [B, S, H].

        Args:
            input_ids_BS: int64.
            features: by token type, [M, H] in token order.
            types_BS: on the host: 0 text, 1 image, 2 video: what replaces the token's embedding. M tokens for the M
                features of a type; features of a type that no token has (a dummy's) are left over.
            position_ids_3BS: int64; used for RoPE only, attention never sees it.
            visible: padding or packed documents.
        """
        hidden_BSH = self.embed(input_ids_BS, features, types_BS)
        cos_B1SR, sin_B1SR = self.rotary_emb(position_ids_3BS, hidden_BSH.dtype)
        for layer in self.layers:
            hidden_BSH = layer(hidden_BSH, cos_B1SR, sin_B1SR, visible)
        return self.norm(hidden_BSH)

    def embed(self, input_ids_BS: Tensor, features: dict[int, Tensor], types_BS: Tensor) -> Tensor:
        """Token embeddings [B, S, H] with the features in their places."""
        hidden_BSH = self.embed_tokens(input_ids_BS)
        hidden_TH = hidden_BSH.flatten(0, 1)
        for kind, features_MH in features.items():
            # Places counted by the host: a mask on the device would let it wait for their number in backward.
            place_M = (types_BS.flatten() == kind).nonzero().flatten().to(hidden_TH.device)
            # A dummy's features replace nothing, yet this gives them a gradient of zeros, and so all vision weights.
            hidden_TH = hidden_TH.index_copy(0, place_M, features_MH[: len(place_M)].to(hidden_TH.dtype))
        return hidden_TH.view_as(hidden_BSH)


def visible_tokens(attention_mask_BS: Tensor | None, documents: list[int] | None, device: torch.device) -> Visible:
    """What each token sees. No mask where nothing is padded: plain causal attention is several times faster.

    Args:
        attention_mask_BS, documents: on the host.   device: the model's.
    """
    if documents is not None:
        return Visible(documents=documents)
    if attention_mask_BS is None or bool((attention_mask_BS != 0).all()):
        return Visible()
    return Visible(causal_mask((attention_mask_BS != 0).to(device)))

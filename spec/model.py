"""GLM-4.5V as one function of its published weights."""

# Shapes: B batch, S sequence, N vision patches, P values of a patch, V vocabulary, T = B*S, K experts per token.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from spec import text, vision
from spec.config import Config
from spec.numerics import Policy, linear
from spec.rope import mrope_positions
from spec.router import Routing
from spec.scope import Scope


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Attributes:
        input_ids: [B, S] int64.   attention_mask: [B, S], 0 at padding (left or right).
        mm_token_type_ids: [B, S], 1 where an image feature replaces the embedding, else 0.
        pixel_values: [N, P] and image_grid_thw: [n, 3], the images of the batch in token order; None for text only.
        labels: [B, S], -100 where nothing is learned; not shifted.
    """

    input_ids: Tensor
    attention_mask: Tensor
    mm_token_type_ids: Tensor
    pixel_values: Tensor | None = None
    image_grid_thw: Tensor | None = None
    labels: Tensor | None = None


@dataclass(frozen=True)
class Output:
    """logits [B, S, V] (meaningless at padding) and the routing of every MoE layer, by layer index."""

    logits: Tensor
    routing: dict[int, Routing]


def forward(
    weights: Mapping[str, Tensor],
    config: Config,
    batch: Batch,
    policy: Policy,
    pinned: Mapping[int, Tensor] | None = None,
) -> Output:
    """Logits of a micro-batch.

    Args:
        weights: published names to tensors of any float dtype.
        pinned: expert choices [T, K] by layer index, instead of the router's own.

    Raises:
        ValueError: the images' features do not fill the image tokens exactly.
    """
    root = Scope(weights)
    table = root["model.language_model.embed_tokens.weight"]
    hidden_BSH = policy.enter(F.embedding(batch.input_ids, table))
    image_BS = batch.mm_token_type_ids == 1
    if batch.pixel_values is not None and batch.image_grid_thw is not None:
        visual = root / "model" / "visual"
        features_MH = vision.tower(batch.pixel_values, batch.image_grid_thw, visual, config.vision, policy)
        if len(features_MH) != image_BS.sum():
            raise ValueError(f"{len(features_MH)} image features for {int(image_BS.sum())} image tokens")
        hidden_BSH = hidden_BSH.masked_scatter(image_BS[..., None], features_MH)
    real_BS = batch.attention_mask != 0
    merge = config.vision.spatial_merge_size
    position_3BS = mrope_positions(real_BS, batch.mm_token_type_ids, batch.image_grid_thw, merge)
    language = root / "model" / "language_model"
    hidden_BSH, routing = text.decoder(hidden_BSH, position_3BS, real_BS, language, config.text, policy, pinned or {})
    return Output(linear(hidden_BSH, root["lm_head.weight"], None, policy), routing)

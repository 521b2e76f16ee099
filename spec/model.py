"""GLM-4.5V as one function of its published weights."""

# Shapes: B batch, S sequence, N vision patches, P values of a patch, V vocabulary, T = B*S, K experts per token.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spec import text, vision
from spec.config import Config
from spec.numerics import Policy, linear
from spec.rope import mrope_positions
from spec.router import Routing
from spec.scope import Scope

IMAGE, VIDEO = 1, 2


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Attributes:
        input_ids: [B, S] int64.   attention_mask: [B, S], 0 at padding (left or right).
        mm_token_type_ids: [B, S], 1 where an image feature replaces the embedding, 2 where a video's does, else 0.
        pixel_values: [N, P] and image_grid_thw: [n, 3], the images of the batch in token order; None without any.
        pixel_values_videos, video_grid_thw: the same for videos.
        labels: [B, S], -100 where nothing is learned; not shifted.
        document_ids: [B, S], for rows that pack several documents: which one a token belongs to (-1 at padding).
            None: every row is one document.
    """

    input_ids: Tensor
    attention_mask: Tensor
    mm_token_type_ids: Tensor
    pixel_values: Tensor | None = None
    image_grid_thw: Tensor | None = None
    labels: Tensor | None = None
    pixel_values_videos: Tensor | None = None
    video_grid_thw: Tensor | None = None
    document_ids: Tensor | None = None

    @property
    def documents(self) -> Tensor:
        """[B, S]: number of the document that each token belongs to, -1 at padding."""
        if self.document_ids is not None:
            return self.document_ids
        return (self.attention_mask != 0).long() - 1

    @property
    def grids(self) -> dict[int, Tensor]:
        """Grids by token type."""
        found = {IMAGE: self.image_grid_thw, VIDEO: self.video_grid_thw}
        return {kind: grid for kind, grid in found.items() if grid is not None}

    @property
    def pixels(self) -> dict[int, Tensor]:
        """Patches by token type."""
        found = {IMAGE: self.pixel_values, VIDEO: self.pixel_values_videos}
        return {kind: patches for kind, patches in found.items() if patches is not None}


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
    record: dict[str, Tensor] | None = None,
) -> Output:
    """Logits of a micro-batch.

    Args:
        weights: published names to tensors of any float dtype.
        pinned: expert choices [T, K] by layer index, instead of the router's own.
        record: filled with what each part of the network returned, under its module's published name.

    Raises:
        ValueError: the features do not fill the image or video tokens exactly.
    """
    root = Scope(weights, record=record)
    table = root["model.language_model.embed_tokens.weight"]
    hidden_BSH = policy.enter(F.embedding(batch.input_ids, table))
    visual, features = root / "model" / "visual", []
    for kind, pixel_values_NP in batch.pixels.items():
        features_MH = vision.tower(pixel_values_NP, batch.grids[kind], visual, config.vision, policy)
        features.append(features_MH)
        place_BS = batch.mm_token_type_ids == kind
        if len(features_MH) != place_BS.sum():
            raise ValueError(f"{len(features_MH)} features for {int(place_BS.sum())} tokens of type {kind}")
        hidden_BSH = hidden_BSH.masked_scatter(place_BS[..., None], features_MH)
    if features:
        visual.told(torch.cat(features))
    merge = config.vision.spatial_merge_size
    position_3BS = mrope_positions(batch.documents, batch.mm_token_type_ids, batch.grids, merge)
    language = root / "model" / "language_model"
    hidden_BSH, routing = text.decoder(
        hidden_BSH, position_3BS, batch.documents, language, config.text, policy, pinned or {}
    )
    return Output(linear(hidden_BSH, root["lm_head.weight"], None, policy), routing)

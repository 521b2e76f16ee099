"""The vision tower of GLM-4.5V: patches to features of the text decoder's width.

Source: `vision_config` of the published config.json: patch embedding, learned positions sampled bicubically, axial
rope, attention inside each image, 2x2 downsampling and merger.
"""

# Shapes: N patches, P = 3*2*14*14 values of a patch, C vision hidden, M = N / merge^2 merged patches, H text hidden.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spec.config import VisionConfig
from spec.numerics import Policy, attend, linear, rms_norm, swiglu_mlp
from spec.rope import rotate, vision_cos_sin
from spec.scope import Scope


def tower(
    pixel_values_NP: Tensor, image_grid_thw: Tensor, weights: Scope, config: VisionConfig, policy: Policy
) -> Tensor:
    """Features [M, H] of all images, in the order of their placeholder tokens.

    Args:
        pixel_values_NP: patches flattened as (channel, time, row, column), ordered in merge x merge blocks.
        image_grid_thw: [n, 3] in patches.   weights: scope `model.visual`.
    """
    row_N, column_N, image_N, segment_N = patch_places(image_grid_thw, config.spatial_merge_size)
    kernel = weights["patch_embed.proj.weight"].flatten(1)
    hidden_NC = linear(policy.enter(pixel_values_NP), kernel, weights["patch_embed.proj.bias"], policy)
    hidden_NC = rms_norm(hidden_NC, weights["post_conv_layernorm.weight"], config.rms_norm_eps, policy)
    height_N, width_N = image_grid_thw[image_N, 1], image_grid_thw[image_N, 2]
    table = weights["embeddings.position_embedding.weight"]
    hidden_NC = hidden_NC + position_embedding(table, row_N, column_N, height_N, width_N, config, policy)
    cos, sin = vision_cos_sin(row_N, column_N, config, policy)
    allowed_NN = segment_N[:, None] == segment_N[None, :]
    for index in range(config.depth):
        hidden_NC = block(hidden_NC, cos, sin, allowed_NN, weights / "blocks" / index, config, policy)
    hidden_NC = rms_norm(hidden_NC, weights["post_layernorm.weight"], config.rms_norm_eps, policy)
    return merger(downsample(hidden_NC, weights / "downsample", config, policy), weights / "merger", policy)


def patch_places(image_grid_thw: Tensor, merge: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row, column, image and attention segment (one per temporal patch) of every patch, each [N]."""
    rows, columns, images, segments = [], [], [], []
    segment = 0
    for image, (frames, height, width) in enumerate(image_grid_thw.tolist()):
        row = torch.arange(height)[:, None].expand(height, width)
        column = torch.arange(width)[None, :].expand(height, width)
        row, column = (blockwise(place, merge) for place in (row, column))
        for _ in range(frames):
            rows.append(row)
            columns.append(column)
            images.append(torch.full_like(row, image))
            segments.append(torch.full_like(row, segment))
            segment += 1
    return torch.cat(rows), torch.cat(columns), torch.cat(images), torch.cat(segments)


def blockwise(grid_hw: Tensor, merge: int) -> Tensor:
    """Flatten a grid so that the patches of each merge x merge block stand together."""
    height, width = grid_hw.shape
    return grid_hw.reshape(height // merge, merge, width // merge, merge).permute(0, 2, 1, 3).flatten()


def position_embedding(
    table: Tensor,
    row_N: Tensor,
    column_N: Tensor,
    height_N: Tensor,
    width_N: Tensor,
    config: VisionConfig,
    policy: Policy,
) -> Tensor:
    """The square table of learned positions, stretched over each image's grid and sampled bicubically, [N, C].

    Patch centres map to ((i + 0.5) / size * 2 - 1); taps beyond the border repeat it. Wide, then rounded.
    """
    side = config.table_side
    table_1Css = policy.widen(policy.round(table)).T.reshape(1, -1, side, side)
    x = (policy.widen(column_N) + 0.5) / width_N * 2 - 1
    y = (policy.widen(row_N) + 0.5) / height_N * 2 - 1
    grid = torch.stack([x, y], -1)[None, :, None]
    sampled = F.grid_sample(table_1Css, grid, mode="bicubic", padding_mode="border", align_corners=False)
    return policy.round(sampled[0, :, :, 0].T)


def block(
    hidden_NC: Tensor,
    cos: Tensor,
    sin: Tensor,
    allowed_NN: Tensor,
    weights: Scope,
    config: VisionConfig,
    policy: Policy,
) -> Tensor:
    """Pre-norm attention and SwiGLU MLP, all without bias; queries and keys turn in the wide dtype."""
    normed = rms_norm(hidden_NC, weights["norm1.weight"], config.rms_norm_eps, policy)
    qkv = linear(normed, weights["attn.qkv.weight"], None, policy)
    query, key, value = qkv.unflatten(-1, (3, config.num_heads, config.head_dim)).permute(1, 2, 0, 3)
    query, key = (policy.round(rotate(policy.widen(x), cos, sin)) for x in (query, key))
    output = attend(query, key, value, allowed_NN, config.head_dim**-0.5, policy).transpose(0, 1).flatten(-2)
    hidden_NC = hidden_NC + linear(output, weights["attn.proj.weight"], None, policy)
    normed = rms_norm(hidden_NC, weights["norm2.weight"], config.rms_norm_eps, policy)
    gate, up, down = (weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return hidden_NC + swiglu_mlp(normed, gate, up, down, policy)


def downsample(hidden_NC: Tensor, weights: Scope, config: VisionConfig, policy: Policy) -> Tensor:
    """A convolution whose kernel and stride are one merge block: [N, C] to [M, H]."""
    merge = config.spatial_merge_size
    blocks_MCmm = hidden_NC.unflatten(0, (-1, merge, merge)).permute(0, 3, 1, 2)
    return linear(blocks_MCmm.flatten(1), weights["weight"].flatten(1), weights["bias"], policy)


def merger(hidden_MH: Tensor, weights: Scope, policy: Policy) -> Tensor:
    """Projection, LayerNorm, GELU, then a SwiGLU MLP of width `intermediate_size`."""
    projected = linear(hidden_MH, weights["proj.weight"], None, policy)
    scale, shift = (policy.round(weights[f"post_projection_norm.{name}"]) for name in ("weight", "bias"))
    activated = F.gelu(F.layer_norm(projected, projected.shape[-1:], scale, shift, eps=1e-5))
    gate, up, down = (weights[f"{name}_proj.weight"] for name in ("gate", "up", "down"))
    return swiglu_mlp(activated, gate, up, down, policy)

"""Random weights for the tiny model, drawn so that every gradient is far from zero and every expert is chosen."""

from __future__ import annotations

import math
import zlib

import numpy as np
import torch

from glmv.checkpoint.hub_names import HubTensor

# A large common offset with a small spread, as published GLM models have it: rounded to bfloat16 (steps of 0.0625 here)
# the biases collapse and other experts are chosen.
BIAS_OFFSET, BIAS_SPREAD = 10.16, 0.15
_TABLES = ("embed_tokens.weight", "position_embedding.weight")


def draw(tensor: HubTensor, seed: int) -> torch.Tensor:
    """Draw one tensor, from a stream of its own: another depth or expert count leaves it as it is."""
    stream = np.random.Generator(np.random.PCG64([seed, zlib.crc32(tensor.name.encode())]))
    normal = torch.from_numpy(stream.standard_normal(tensor.shape, dtype=np.float32))
    offset, spread = _law(tensor)
    return (offset + spread * normal).to(tensor.dtype)


def _law(tensor: HubTensor) -> tuple[float, float]:
    """Mean and standard deviation of a tensor's entries."""
    if tensor.name.endswith("e_score_correction_bias"):
        return BIAS_OFFSET, BIAS_SPREAD
    if tensor.name.endswith(_TABLES):
        return 0.0, 0.5
    if len(tensor.shape) > 1:
        return 0.0, 1.0 / math.sqrt(math.prod(tensor.shape[1:]))
    return (1.0, 0.1) if "norm" in tensor.name and tensor.name.endswith("weight") else (0.0, 0.1)

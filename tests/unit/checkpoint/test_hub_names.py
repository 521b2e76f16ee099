"""The list of tensors, against the published repository's own figures."""

import math
from collections import Counter

import pytest
import torch

from glmv.checkpoint.hub_names import hub_tensors
from glmv.model.config import ModelConfig

PUBLISHED = {
    "text_config": {
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1536,
        "intermediate_size": 10944,
        "out_hidden_size": 4096,
        "num_heads": 12,
    },
}


@pytest.fixture(scope="module")
def published():
    return hub_tensors(ModelConfig.from_hf(PUBLISHED))


def test_names_are_as_many_as_published_and_different(published):
    assert len({tensor.name for tensor in published}) == len(published) == 18_106


def test_parameters_are_as_many_as_published(published):
    biases = 45 * 128  # buffers, which the published figure leaves in
    assert sum(math.prod(tensor.shape) for tensor in published) == 107_710_933_120
    assert sum(tensor.shape == (128,) for tensor in published) * 128 == biases


def test_only_the_router_bias_is_fp32(published):
    dtypes = Counter(tensor.dtype for tensor in published)
    assert dtypes == {torch.float32: 45, torch.bfloat16: 18_106 - 45}
    assert all(tensor.name.endswith("e_score_correction_bias") for tensor in published if tensor.dtype == torch.float32)

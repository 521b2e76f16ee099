"""Logits, loss and every gradient of the whole model, against the law."""

import pytest
import torch
from model_cases import SAMPLES, answers, choices, make_batch, run

from glmv.ops.kernels import Kernels
from spec.model import forward
from spec.numerics import Policy

FP32, BF16 = torch.float32, torch.bfloat16
LOOPED = Kernels(grouped=False)
GROUPED = Kernels(grouped=True)
EAGER = Kernels(attention="eager")
LOOPED_EAGER = Kernels(grouped=False, attention="eager")


@pytest.mark.parametrize("case", SAMPLES)
def test_float64(case, tiny, device, judge):
    batch = make_batch(case)
    said, chosen = answers(tiny.model(torch.float64, device), batch)
    judge(said, tiny.law(batch, chosen), torch.float64)


ROUNDED = {
    "fp32-looped": ("images_not_square", FP32, LOOPED),
    "fp32-grouped": ("padded_right", FP32, GROUPED),
    "fp32-eager": ("padded_left", FP32, EAGER),
    "bf16-looped": ("padded_right", BF16, LOOPED),
    "bf16-grouped": ("images_not_square", BF16, GROUPED),
    "bf16-eager": ("padded_left", BF16, EAGER),
    "fp32-looped-video": ("image_and_video_padded_right", FP32, LOOPED),
    "fp32-grouped-packed": ("packed", FP32, GROUPED),
    "fp32-eager-packed": ("packed_equal_lengths_and_padding", FP32, LOOPED_EAGER),
    "bf16-looped-packed": ("packed", BF16, LOOPED),
    "bf16-grouped-video": ("image_and_video_padded_right", BF16, GROUPED),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded(name, tiny, device, judge):
    case, dtype, kernels = ROUNDED[name]
    batch = make_batch(case)
    said, chosen = answers(tiny.model(dtype, device, kernels), batch)
    judge(said, tiny.law(batch, chosen), dtype)


def test_group_limited_unnormalised_scaled_routing(tiny_groups, judge):
    batch = make_batch("one_image")
    said, chosen = answers(tiny_groups.model(torch.float64), batch)
    judge(said, tiny_groups.law(batch, chosen), torch.float64)


@pytest.mark.parametrize("case", SAMPLES)
def test_experts_chosen(case, tiny, device):
    batch = make_batch(case)
    real_T = batch.attention_mask.flatten() != 0
    truth = forward(tiny.weights, tiny.law_config, batch, Policy()).routing
    for dtype in (torch.float64, FP32):
        model = tiny.model(dtype, device)
        with choices(model) as chosen, torch.no_grad():
            run(model, batch)
        assert chosen.keys() == truth.keys()
        for layer, index_TK in chosen.items():
            mine, laws = (index[real_T].sort(-1).values for index in (index_TK, truth[layer].top_k_index_TK))
            assert mine.equal(laws)

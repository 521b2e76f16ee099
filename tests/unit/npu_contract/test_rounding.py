"""Dtypes of what comes out, and where it is rounded: once, at the end."""

import pytest
import torch
from contract_tools import call, drawn, rounded_once, tensors, truth

from spec.npu_ops import OPERATORS
from spec.npu_ops.cases import edges
from spec.npu_ops.cases.draws import Draw

ROUNDED_ONCE = [
    "npu_moe_token_permute_grad_v2",
    "npu_moe_token_unpermute",
    "npu_moe_token_unpermute_grad_v2",
    "npu_grouped_matmul",
    "npu_swiglu",
    "npu_swiglu_backward",
    "npu_rms_norm",
    "npu_fusion_attention",
    "npu_ring_attention_update",
]


@pytest.mark.parametrize("name", ROUNDED_ONCE)
def test_rounded_once(name):
    for seed in range(60):
        case = drawn(name, seed)
        pairs = zip(tensors(call(name, case)), tensors(call(name, truth(case))), strict=True)
        assert all(rounded_once(found, expected) for found, expected in pairs), seed


def test_float32_tables_are_rounded_before_they_turn_bfloat16_rows():
    x, cos, sin = next(case for case in edges("npu_rotary_mul") if "float32 tables" in case.label).args
    found = OPERATORS["npu_rotary_mul"](x, cos, sin)
    rounded = truth_of_rotary(x, cos.bfloat16(), sin.bfloat16())
    assert rounded_once(found, rounded)
    assert not rounded_once(found, truth_of_rotary(x, cos, sin))


def truth_of_rotary(*arguments):
    return OPERATORS["npu_rotary_mul"].forward(*(x.double() for x in arguments))


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_unpermute_keeps_the_dtype_of_the_rows(rows, weights):
    draw, places = Draw.seeded(0), torch.arange(6, dtype=torch.int32)
    out = OPERATORS["npu_moe_token_unpermute"](draw.normal(6, 4, dtype=rows), places, draw.normal(3, 2, dtype=weights))
    assert out.dtype == rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_statistics_are_float32(dtype):
    q = Draw.seeded(0).normal(1, 2, 5, 8, dtype=dtype)
    output, maximum, total, empty, *_ = OPERATORS["npu_fusion_attention"](q, q, q, 2, "BNSD")
    assert (output.dtype, maximum.dtype, total.dtype, empty.dtype) == (dtype, torch.float32, torch.float32, dtype)
    assert OPERATORS["npu_rms_norm"](q, q[0, 0, 0])[1].dtype == torch.float32


def test_the_gradient_of_gamma_is_float32():
    x, gamma = Draw.seeded(0).normal(3, 8).bfloat16(), torch.ones(8, dtype=torch.bfloat16)
    rstd = OPERATORS["npu_rms_norm"](x, gamma)[1]
    to_x, to_gamma = OPERATORS["npu_rms_norm_backward"](x, x, gamma, rstd)
    assert (to_x.dtype, to_gamma.dtype) == (torch.bfloat16, torch.float32)


def test_gradients_of_float32_tables_have_the_dtype_of_the_rows():
    x, table = Draw.seeded(0).normal(2, 3, 4, 8).bfloat16(), torch.ones(1, 1, 4, 8)
    assert [grad.dtype for grad in OPERATORS["npu_rotary_mul_backward"](x, x, table, table)] == [torch.bfloat16] * 3


def test_permutation_gives_int32_places():
    assert OPERATORS["npu_moe_token_permute"](torch.ones(3, 2), torch.zeros(3, 2).long())[1].dtype == torch.int32

"""Every operator of the machine that runs as torch_npu's own, forward and gradient, by Ascend's accuracy classes."""

import pytest
import torch
from op_cases import draw, leaf
from operator_cases import ANGLES, CASES, EPS, FUSED

from glmv.ops.experts import permute
from glmv.ops.norm import rms_norm
from glmv.ops.rope import rotate
from glmv.verify.npu_accuracy import STANDARD, judge_all

BF16, FP16, FP32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_within_its_accuracy_class(name, dtype, device):
    case = CASES[name]
    mine, benchmark, truth = case.on_device(dtype, device), case.by_contract(dtype), case.by_contract(FLOAT64)
    for part, standard in enumerate((case.operator, f"{case.operator}.backward")):
        standard = STANDARD.get(standard) or STANDARD[case.operator]
        assert judge_all(standard, mine[part], benchmark[part], truth[part]) == []


def test_every_standard_is_held_by_a_case():
    assert {case.operator for case in CASES.values()} == {name.removesuffix(".backward") for name in STANDARD}


@pytest.mark.parametrize("name", CASES)
def test_the_npus_own_operator_runs(name, device, count):
    with count() as counted:
        CASES[name].on_device(BF16, device)
    assert counted.calls[CASES[name].operator] > 0


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
def test_permutation_counts_and_inverse_are_exact(index_dtype, device):
    index_TK = torch.tensor([[3, 1], [0, 3], [3, 5], [1, 0]])
    hidden = draw(4, 8).to(BF16)
    rows, counts, order = permute(hidden.to(device), index_TK.to(device, index_dtype), 6, kernels=FUSED)
    assert counts.cpu().equal(torch.bincount(index_TK.flatten(), minlength=6))
    assert counts.dtype == torch.int64
    assert rows.cpu()[order.inverse_R.cpu().long()].equal(hidden.repeat_interleave(2, 0))


@pytest.mark.parametrize("name", ["permute", "rms_norm", "rotate_some_channels", "rotate_patches"])
def test_a_dtype_without_a_kernel_goes_to_pytorch_and_that_is_said(name, device, said):
    mine = CASES[name].on_device(FLOAT64, device)[0]["output"]
    assert mine.cpu().equal(CASES[name].on_device(FLOAT64, torch.device("cpu"))[0]["output"])
    assert any("no kernel for float64" in message for message in said())


@pytest.mark.parametrize("name", ["causal_attention", "attention_in_segments"])
def test_a_head_that_is_too_wide_goes_to_pytorch_and_that_is_said(name, device, said, count):
    states = {part: value.repeat(*[1] * (value.dim() - 1), 49) for part, value in CASES[name].inputs.items()}
    with count() as counted:
        CASES[name].run(**{part: value.to(device, BF16) for part, value in states.items()})
    assert "npu_fusion_attention" not in counted.calls
    assert any("head dim 784 is larger than 768" in message for message in said())


def test_fp32_angles_are_not_rounded_to_the_dtype_of_the_states(device):
    """npu_rotary_mul would round them, unasked."""
    states, cos, sin = draw(2, 3, 5, 16).to(BF16), ANGLES.cos().float(), ANGLES.sin().float()
    given = states.to(device), cos.to(device), sin.to(device)
    assert rotate(*given, kernels=FUSED).cpu().equal(rotate(states.float(), cos, sin, kernels=FUSED))


def test_the_norm_of_bf16_is_rounded_once(device):
    hidden, weight = leaf(draw(64, 24), BF16, device), leaf(1 + draw(24, seed=1) / 8, BF16, device)
    wide = hidden.detach().cpu().float()
    once = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.detach().cpu().float()
    assert rms_norm(hidden, weight, EPS, kernels=FUSED).detach().cpu().equal(once.to(BF16))


def test_the_epsilon_of_the_norm_is_the_models(device):
    hidden = torch.full((1, 8), 1e-3)
    normed = rms_norm(hidden.to(device), torch.ones(8, device=device), 1e-2, kernels=FUSED)
    assert normed.max() < 0.011  # with the operator's own epsilon: 0.7

import pytest
import torch
from op_cases import DTYPES, draw, leaf

from glmv.ops.kernels import Kernels
from glmv.ops.norm import rms_norm
from glmv.ops.rope import inverse_frequencies, rotate
from spec import numerics, rope

HIDDEN, WEIGHT, GRAD = draw(5, 24), draw(24, seed=1), draw(5, 24, seed=2)


def norm_law(policy):
    hidden, weight = leaf(HIDDEN, policy.wide), leaf(WEIGHT, policy.wide)
    output = numerics.rms_norm(policy.enter(hidden), weight, 1e-5, policy)
    output.backward(policy.round(GRAD))
    return {"output": output.detach(), "hidden": hidden.grad, "norm.weight": weight.grad}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(dtype, judge):
    hidden, weight = leaf(HIDDEN, dtype), leaf(WEIGHT, dtype)
    output = rms_norm(hidden, weight, 1e-5, kernels=Kernels())
    output.backward(GRAD.to(dtype))
    judge({"output": output, "hidden": hidden.grad, "norm.weight": weight.grad}, norm_law, dtype)


def test_rms_norm_rounds_before_the_weight_multiplies():
    weight = torch.full((24,), 1 + 2**-7, dtype=torch.bfloat16)
    hidden = HIDDEN.bfloat16()
    once = (hidden.float() * (hidden.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()).bfloat16()
    assert rms_norm(hidden, weight, 1e-5, kernels=Kernels()).equal(once * weight)


@pytest.mark.parametrize("dim", [16, 64, 128])
def test_inverse_frequencies(dim, judge):
    def frequencies(policy):
        return {"frequency": rope.frequencies(dim, 10000.0, policy)}

    judge({"frequency": inverse_frequencies(10000.0, dim, torch.float64)}, frequencies, torch.float64)
    assert inverse_frequencies(10000.0, dim).dtype == torch.float32


def test_channels_beyond_the_rotary_dim_pass_through():
    states, angle = draw(3, 20), draw(3, 12, seed=1)
    rotated = rotate(states, angle.cos(), angle.sin(), kernels=Kernels())
    assert rotated[:, 12:].equal(states[:, 12:])
    assert rotated[:, :12].equal(rope.rotate(states, angle.cos(), angle.sin())[:, :12])


def test_a_quarter_turn_moves_channel_i_to_i_plus_half():
    states = torch.tensor([1.0, 2.0, 3.0, 4.0])
    turned = rotate(states, torch.zeros(4), torch.ones(4), kernels=Kernels())
    assert turned.tolist() == [-3.0, -4.0, 1.0, 2.0]

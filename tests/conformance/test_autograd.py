"""The wheel's autograd nodes send gradients where the contract says, in the shapes and dtypes that it says."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from glmv.verify.wheel.autograd import (
    contract_gradients,
    has_autograd,
    wheel_gradients,
    wheel_inputs,
    wheel_outputs,
)
from glmv.verify.wheel.parity import WITHOUT_META_KERNEL, drawn
from spec.npu_ops import OPERATORS

pytestmark = pytest.mark.conformance

DRAWN = 20
WITH_GRADIENT = [name for name, contract in OPERATORS.items() if contract.backward is not None]
# The node of an operator calls its gradient operator, which is to be inferred too.
INFERRED = [name for name in WITH_GRADIENT if f"{name}_backward" not in WITHOUT_META_KERNEL]


@pytest.mark.parametrize("name", OPERATORS)
def test_who_has_a_gradient_at_all(name):
    assert has_autograd(name) == (name in WITH_GRADIENT)


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_the_inputs_that_get_a_gradient(name):
    for case in drawn(name, DRAWN):
        expected = {argument for argument, grad in contract_gradients(name, case).items() if grad is not None}
        assert wheel_inputs(name, case) == expected


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_the_outputs_that_autograd_follows(name):
    followed = wheel_outputs(name, drawn(name, 1)[0])
    assert [place for place, is_followed in enumerate(followed) if not is_followed] == [
        *OPERATORS[name].non_differentiable
    ]


@pytest.mark.parametrize("name", INFERRED)
def test_gradients_have_the_contracts_shapes_and_dtypes(name, agree, report):
    cases = drawn(name, DRAWN)
    report.autograd_cases[name] = len(cases)
    found = [(wheel_gradients(name, case), contract_gradients(name, case)) for case in cases]
    agree(f"{name}: wheel {wheel}, contract {ours}" for wheel, ours in found if wheel != ours)


def test_gating_refuses_a_bias_that_requires_a_gradient():
    with FakeTensorMode():
        scores, bias = torch.ones(3, 8, device="npu"), torch.ones(8, device="npu", requires_grad=True)
        with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'bias'"):
            torch.ops.npu.npu_moe_gating_top_k(scores, 2, bias=bias, norm_type=1)


def test_a_raw_grouped_matmul_loses_the_gradient():
    with FakeTensorMode():
        rows, weight = (torch.ones(*shape, device="npu", requires_grad=True) for shape in ((4, 4), (1, 4, 4)))
        ends = torch.ones(1, dtype=torch.int64, device="npu")
        product = torch.ops.npu.npu_grouped_matmul([rows], [weight], group_list=ends, split_item=3, group_type=0)[0]
        product.sum().backward()
    assert (rows.grad, weight.grad) == (None, None)

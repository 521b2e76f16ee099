"""Operators on the device are the contract, and autograd finds the contract's gradient."""

import pytest

from spec.npu_ops import OPERATORS

EXCHANGES = {"npu_alltoallv_gmm", "npu_gmm_alltoallv"}


@pytest.mark.parametrize("name", sorted(set(OPERATORS) - EXCHANGES))
def test_outputs_and_gradients_are_the_contract(operator_facts, name):
    assert operator_facts[name]["wrong"] == {}
    assert operator_facts[name]["calls"] >= 6


def test_an_operator_without_gradient_stops_backward(device_facts):
    assert device_facts["no_gradient"].startswith("RuntimeError: npu_grouped_matmul has no gradient on an NPU")


def test_statistics_are_not_differentiable(device_facts):
    assert device_facts["statistics_have_no_gradient"] == [True, False]


def test_exchange_inside_an_operator(rank_facts):
    received = [facts["fused_exchange"] for facts in rank_facts]
    assert received == [[[[1.0] * 3, [11.0] * 3], "npu:0"], [[[4.0] * 3, [44.0] * 3], "npu:1"]]

"""The gradients that are written out against torch.autograd through the forward, in float64."""

import pytest
import torch
from contract_tools import call, drawn, equal_in_float64, largest, tensors, truth

from spec.npu_ops import OPERATORS
from spec.npu_ops.cases import edges

DIFFERENTIABLE = [name for name, contract in OPERATORS.items() if contract.backward is not None]


def both_gradients(name, case):
    """(name of input, explicit gradient, autograd's) of every float input, and the size of the numbers involved."""
    contract = OPERATORS[name]
    floats = {key: x for key, x in contract.inputs(case.args, case.kwargs).items() if x.is_floating_point()}
    for x in floats.values():
        x.requires_grad_()
    outputs = call(name, case)
    grad = torch.randn(tensors(outputs)[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.autograd.grad(tensors(outputs)[0], list(floats.values()), grad, allow_unused=True)
    with torch.no_grad():
        grads = [grad] + [None] * (len(tensors(outputs)) - 1)
        found = contract.backward(grads, case.args, case.kwargs, outputs)
    explicit = dict(zip(contract.inputs(case.args, case.kwargs), found, strict=True))
    pairs = [(key, explicit[key], right) for key, right in zip(floats, expected, strict=True)]
    return pairs, largest(grad, *expected)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_drawn(name):
    for seed in range(60):
        pairs, scale = both_gradients(name, truth(drawn(name, seed)))
        for key, explicit, right in pairs:
            assert (explicit is None) == (right is None), (seed, key)
            assert right is None or equal_in_float64(explicit, right, scale), (seed, key)


@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(name, case, id=f"{name}: {case.label}") for name in DIFFERENTIABLE for case in edges(name)],
)
def test_edges(name, case):
    pairs, scale = both_gradients(name, truth(case))
    for key, explicit, right in pairs:
        rows_of_nan = key == "probs" and "NaN" in case.label
        assert rows_of_nan or equal_in_float64(explicit, right, scale), key


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_some_input_has_a_gradient(name):
    pairs, _ = both_gradients(name, truth(drawn(name, 0)))
    assert any(explicit is not None for _, explicit, _ in pairs)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_dtypes_of_drawn_gradients(name):
    contract = OPERATORS[name]
    for seed in range(20):
        case = drawn(name, seed)
        outputs = call(name, case)
        found = contract.backward([torch.ones_like(tensors(outputs)[0])], case.args, case.kwargs, outputs)
        for (key, x), grad in zip(contract.inputs(case.args, case.kwargs).items(), found, strict=True):
            first = case.args[0].dtype
            dtype = torch.float32 if key == "gamma" else first if key in ("r1", "r2") else x.dtype
            assert grad is None or (grad.dtype, grad.shape) == (dtype, x.shape), (seed, key)


@pytest.mark.parametrize("name", ["npu_grouped_matmul", "npu_ring_attention_update", "npu_gmm_alltoallv"])
def test_operators_without_autograd(name):
    assert OPERATORS[name].backward is None


def test_without_a_gradient_of_the_output_every_input_has_none():
    case = drawn("npu_rms_norm", 0)
    assert OPERATORS["npu_rms_norm"].backward([None, None], case.args, case.kwargs, None) == (None, None)

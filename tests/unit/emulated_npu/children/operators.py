"""Every operator on the device against its contract on the CPU: drawn calls and border cases, outputs and gradients."""

import sys

import torch
from facts import FACTS, report
from torch import Tensor

from glmv.verify import emulated_npu
from spec.npu_ops import OPERATORS
from spec.npu_ops.cases import draw, edges

emulated_npu.install(devices=1, poison=True)
DRAWN = 6
NPU = torch.device("npu", 0)
EXCHANGES = ("npu_alltoallv_gmm", "npu_gmm_alltoallv")  # need ranks: children/ranks.py


def to(value, device):
    """Every tensor elsewhere, with the strides it has."""
    if isinstance(value, Tensor):
        base = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return base.copy_(value) if value.numel() else base
    if isinstance(value, dict):
        return {name: to(item, device) for name, item in value.items()}
    return type(value)(to(item, device) for item in value) if isinstance(value, list | tuple) else value


def tensors_of(value):
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_of(item)]


def same(mine, law):
    """Bit for bit, NaN included."""
    return mine.dtype == law.dtype and mine.shape == law.shape and torch.equal(bits(mine.cpu()), bits(law))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.numel() and tensor.dim() else tensor


def check(name, case):
    """What is wrong with one call: a list of words."""
    contract = OPERATORS[name]
    operator = getattr(torch.ops.npu, name)
    args, kwargs = to(case.args, NPU), to(case.kwargs, NPU)
    inputs = tensors_of(contract.inputs(args, kwargs))
    if contract.backward is not None:
        for tensor in inputs:
            tensor.requires_grad_(tensor.is_floating_point())
    found, expected = operator(*args, **kwargs), contract(*case.args, **case.kwargs)
    pairs = zip(tensors_of([found]), tensors_of([expected]), strict=True)
    wrong = [f"output {i}" for i, (mine, law) in enumerate(pairs) if not same(mine, law)]
    return wrong + (wrong_gradients(contract, case, found, expected, inputs) if contract.backward else [])


def wrong_gradients(contract, case, found, expected, inputs):
    """Compare the graph's gradients with the formula's."""
    first, truth = tensors_of([found])[0], tensors_of([expected])[0]
    grad = torch.linspace(-1, 1, truth.numel()).view(truth.shape).to(truth.dtype)
    first.backward(to(grad, NPU))
    count = len(expected) if isinstance(expected, tuple) else 1
    law = contract.backward((grad, *[None] * (count - 1)), case.args, case.kwargs, expected)
    expected_there = [g is not None for g in law]
    there = [tensor.grad is not None for tensor in inputs]
    if there != expected_there:
        return [f"gradients at {there}, law at {expected_there}"]
    rows = zip(inputs, law, strict=True)
    return [f"gradient {i}" for i, (x, g) in enumerate(rows) if g is not None and not same(x.grad, g.to(x.dtype))]


def findings(name):
    generator = torch.Generator().manual_seed(5)
    cases = [draw(name, generator) for _ in range(DRAWN)] + edges(name)
    rows = {f"{case.label} {i}": check(name, case) for i, case in enumerate(cases)}
    return {"calls": len(cases), "wrong": {label: wrong for label, wrong in rows.items() if wrong}}


if __name__ == "__main__":
    for name in OPERATORS:
        if name not in EXCHANGES:
            FACTS[name] = lambda name=name: findings(name)
    report()
    sys.stdout.flush()

"""The wheel's own autograd nodes against the contract: who gets a gradient, of which shape and dtype.

The nodes are called directly, since the engine casts what they return to the dtype of the input. Tensors are fake ones
on the device `npu`: there autograd is the wheel's own, and its kernels are the meta kernels.
Only in a process that has loaded the wheel (`glmv.verify.wheel.load`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from glmv.verify.wheel.metadata import described, on_device
from spec.npu_ops import OPERATORS
from spec.npu_ops.cases import Case

Gradients = dict[str, str | None]

# Arguments that the wheel's operators refuse when they require a gradient, where others just get none.
REFUSED = {("npu_moe_gating_top_k", "bias")}


def has_autograd(name: str) -> bool:
    """Whether the wheel registers a gradient of the operator for the device."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "AutogradPrivateUse1")


def tensors(value: Any) -> Iterator[Tensor]:  # noqa: ANN401
    """Every tensor of a nested value, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def contract_gradients(name: str, case: Case) -> Gradients:
    """By tensor argument: the gradient that the contract promises, or None; the first output's gradient is ones."""
    contract = OPERATORS[name]
    if contract.backward is None:
        return dict.fromkeys(contract.inputs(case.args, case.kwargs))
    outputs = contract(*case.args, **case.kwargs)
    first = next(tensors(outputs))
    grads = contract.backward([torch.ones_like(first)], case.args, case.kwargs, outputs)
    found = zip(contract.inputs(case.args, case.kwargs), grads, strict=True)
    return {argument: None if grad is None else described(grad) for argument, grad in found}


def wheel_gradients(name: str, case: Case) -> Gradients:
    """The same, as the wheel's node of the first output computes it when every input that can requires a gradient."""
    with FakeTensorMode():
        outputs, leaves = _called_on_npu(name, case)
        node = outputs[0].grad_fn
        assert node is not None
        incoming = [torch.ones_like(outputs[0]), *[None] * (len(node._input_metadata) - 1)]
        grads = node(*incoming)  # type: ignore[operator] # C++ nodes are callable
        grads = grads if isinstance(grads, tuple) else (grads,)
        found = zip(_edges(node, leaves), grads, strict=True)
        return dict.fromkeys(leaves) | {to: described(grad) for to, grad in found if to and grad is not None}


def wheel_inputs(name: str, case: Case) -> set[str]:
    """Tensor arguments that the wheel's node sends a gradient to; unlike the gradient, it needs no meta kernel."""
    with FakeTensorMode():
        outputs, leaves = _called_on_npu(name, case)
        assert outputs[0].grad_fn is not None
        return set(filter(None, _edges(outputs[0].grad_fn, leaves)))


def wheel_outputs(name: str, case: Case) -> list[bool]:
    """For each tensor output of the wheel's operator: whether autograd follows it."""
    with FakeTensorMode():
        return [output.requires_grad for output in _called_on_npu(name, case)[0]]


def _called_on_npu(name: str, case: Case) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Tensor outputs and tensor arguments of a call whose floating-point arguments require gradients where they may."""
    args = on_device(case.args, "npu")
    kwargs = {key: on_device(value, "npu") for key, value in case.kwargs.items()}
    leaves = OPERATORS[name].inputs(args, kwargs)
    for argument, leaf in leaves.items():
        leaf.requires_grad_(leaf.is_floating_point() and (name, argument) not in REFUSED)
    return list(tensors(getattr(torch.ops.npu, name)(*args, **kwargs))), leaves


def _edges(node: torch.autograd.graph.Node, leaves: Mapping[str, Tensor]) -> list[str | None]:
    """For each gradient that a node returns: the argument it goes to."""
    names = {id(leaf): name for name, leaf in leaves.items()}
    leads_to = [getattr(edge, "variable", None) for edge, _ in node.next_functions]  # an edge of an input has one
    return [None if variable is None else names[id(variable)] for variable in leads_to]

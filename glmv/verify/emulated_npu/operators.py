"""`torch.ops.npu.*` and the stand-in module `torch_npu`: each operator is its contract, run on the device's memory.

Kernels exist for the device only, and gradients are wired only there: a call with CPU tensors is refused by PyTorch's
dispatcher, as with the real package.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glmv.verify.emulated_npu.counting import note_call
from glmv.verify.emulated_npu.device import options
from glmv.verify.emulated_npu.state import extension
from spec.npu_ops import OPERATORS, Contract
from spec.npu_ops.schemas import schema

EMULATES = "2.13.0"
VERSION = f"{EMULATES}+emulated"
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


def register() -> torch.library.Library:
    """Define every operator of the contract under `npu::`. The library must be kept alive."""
    library = torch.library.Library("npu", "DEF")
    for name, contract in OPERATORS.items():
        library.define(schema(name, EMULATES))
        library.impl(name, kernel(contract), "PrivateUse1")
        library.impl(name, differentiable(contract), "AutogradPrivateUse1")
    return library


def make_torch_npu() -> types.ModuleType:
    """A module that has the operators of the contract and nothing else of torch_npu's."""
    module = types.ModuleType("torch_npu", "Stand-in for torch_npu: the operators of the contract on an EMULATED npu.")
    module.__spec__ = ModuleSpec("torch_npu", loader=None)
    module.__dict__.update({name: getattr(torch.ops.npu, name) for name in OPERATORS})
    module.__dict__.update(__version__=VERSION, npu=sys.modules["torch.npu"])
    module.__dict__.update(_C=types.SimpleNamespace(_npu_getOption=options.__getitem__))
    return module


def kernel(contract: Contract) -> Any:  # noqa: ANN401
    """What runs on the device: the contract, over host views of the call's memory."""

    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        note_call(contract.name, args, kwargs)
        call = vars(contract.bind(args, kwargs))
        device = common_device(contract.name, call)
        views: dict[int, Tensor] = {}
        return on_npu(contract(**on_host_by_name(call, views)), device, views)

    return run


def common_device(name: str, call: Kwargs) -> torch.device:
    """The device of all tensors of a call; RuntimeError when they are on several."""
    devices = {tensor.device for tensor in tensors_of(call.values())}
    if len(devices) > 1:
        found = " and ".join(sorted(map(str, devices)))
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {found}! (npu::{name})"
        )
    return devices.pop()


def tensors_of(values: Any) -> list[Tensor]:  # noqa: ANN401
    """Every tensor among values and lists of them, in order."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        return []
    return [tensor for value in values for tensor in tensors_of(value)]


def on_host(value: Any, views: dict[int, Tensor]) -> Any:  # noqa: ANN401
    """`value` with host views for npu tensors; `views` remembers the tensor of each view."""
    if isinstance(value, Tensor):
        view = extension().host_view(value)
        views[id(view)] = value
        return view
    if isinstance(value, list | tuple):
        return type(value)(on_host(item, views) for item in value)
    return value


def on_npu(value: Any, device: torch.device, views: dict[int, Tensor]) -> Any:  # noqa: ANN401
    """`value` with npu tensors for CPU tensors; an argument that comes back is that argument."""
    if isinstance(value, Tensor):
        return views[id(value)] if id(value) in views else extension().to_npu(value, device.index)
    if isinstance(value, list | tuple):
        return type(value)(on_npu(item, device, views) for item in value)
    return value


def differentiable(contract: Contract) -> Any:  # noqa: ANN401
    """What autograd calls for npu tensors: the operator as a node of the graph."""
    operator = getattr(torch.ops.npu, contract.name)
    mutates = operator.default._schema.is_mutable

    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        call = vars(contract.bind(args, kwargs))
        inputs = tensors_of(call.values())
        if mutates or not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)):
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*args, **kwargs)
        slots = {id(tensor): position for position, tensor in enumerate(inputs)}
        outputs = Node.apply(contract, operator, with_slots(call, slots), *inputs)
        return list(outputs) if returns_list(operator) else outputs

    return run


def returns_list(operator: Any) -> bool:  # noqa: ANN401
    """Whether the operator's one return value is a list of tensors."""
    returns = operator.default._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "List[Tensor]"


class Slot(int):
    """The place of a tensor among a call's inputs."""


def with_slots(value: Any, slots: Mapping[int, int]) -> Any:  # noqa: ANN401
    """`value` with every tensor replaced by its slot."""
    if isinstance(value, Tensor):
        return Slot(slots[id(value)])
    if isinstance(value, dict):
        return {name: with_slots(item, slots) for name, item in value.items()}
    return type(value)(with_slots(item, slots) for item in value) if isinstance(value, list | tuple) else value


def with_tensors(value: Any, tensors: Sequence[Tensor]) -> Any:  # noqa: ANN401
    """The inverse of `with_slots`."""
    if isinstance(value, Slot):
        return tensors[value]
    if isinstance(value, dict):
        return {name: with_tensors(item, tensors) for name, item in value.items()}
    return type(value)(with_tensors(item, tensors) for item in value) if isinstance(value, list | tuple) else value


class Node(torch.autograd.Function):
    """One call of an operator in the autograd graph; its gradient is the contract's formula."""

    @staticmethod
    def forward(ctx: Any, contract: Contract, operator: Any, call: dict[str, Any], *inputs: Tensor) -> Any:  # noqa: ANN401
        """Run the operator below autograd and keep what its gradient needs."""
        with torch._C._AutoDispatchBelowAutograd():
            outputs = operator(**with_tensors(call, inputs))
        ctx.contract, ctx.call, ctx.inputs = contract, call, len(inputs)
        outputs = tuple(outputs) if isinstance(outputs, list) else outputs
        listed = outputs if isinstance(outputs, tuple) else (outputs,)
        kept = tensors_of(listed)
        ctx.outputs = with_slots(outputs, {id(tensor): position for position, tensor in enumerate(kept)})
        ctx.save_for_backward(*inputs, *kept)
        ctx.mark_non_differentiable(*(listed[position] for position in contract.non_differentiable))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """The contract's gradient, on host views."""
        contract, saved = ctx.contract, ctx.saved_tensors
        if contract.backward is None:
            raise RuntimeError(
                f"{contract.name} has no gradient on an NPU: torch_npu warns and goes on without one, the emulated"
                " device stops. Call it inside a torch.autograd.Function that knows the gradient."
            )
        extension().count_call(f"{contract.name}.backward")
        views: dict[int, Tensor] = {}
        inputs, kept = saved[: ctx.inputs], saved[ctx.inputs :]
        call = on_host_by_name(with_tensors(ctx.call, inputs), views)
        outputs = on_host(with_tensors(ctx.outputs, kept), views)
        found = contract.backward(on_host(grads, views), (), call, outputs)
        device = inputs[0].device
        return (None, None, None, *on_npu(found, device, views))


def on_host_by_name(call: dict[str, Any], views: dict[int, Tensor]) -> dict[str, Any]:
    """`on_host` of every argument."""
    return {name: on_host(value, views) for name, value in call.items()}

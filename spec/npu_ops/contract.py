"""What one torch_npu operator promises: a refusal, a value, a gradient."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# The arguments of one call, by the names of the operator's signature, defaults filled in.
Call = SimpleNamespace
Gradients = Callable[[Sequence[Any], Call, Any], dict[str, Tensor]]
Backward = Callable[[Sequence[Tensor | None], Sequence[Any], Mapping[str, Any], Any], tuple[Tensor | None, ...]]


@dataclass(frozen=True)
class Contract:
    """One operator.

    Attributes:
        name: operator name without its namespace.
        forward: the value, on CPU tensors, with exactly the public signature. Dtypes and rounding are the device's; in
            float64 it stays in float64 throughout and is the truth.
        rules: raises `Refused` for a call that the device's operator refuses (float64 among them).
        gradients: gradients of the outputs' gradients, by argument name, or None when the operator has no autograd at
            all (a call under `requires_grad` then silently gives no gradient).
        non_differentiable: positions of outputs that autograd marks as such.
    """

    name: str
    forward: Callable[..., Any]
    rules: Callable[[Call], None]
    gradients: Gradients | None = None
    non_differentiable: tuple[int, ...] = ()

    @cached_property
    def signature(self) -> inspect.Signature:
        """The operator's public signature."""
        return inspect.signature(self.forward)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """The call's arguments by name; TypeError when they do not fit the signature."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return Call(**bound.arguments)

    def check(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Raise `Refused` if the device's operator would refuse this call."""
        self.rules(self.bind(args, kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """The operator as the device runs it: refused, or computed."""
        self.check(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Every tensor of the call in signature order; an element of a tensor list is named `x[0]`."""
        tensors: dict[str, Tensor] = {}
        for name, value in vars(self.bind(args, kwargs)).items():
            if isinstance(value, Tensor):
                tensors[name] = value
            elif isinstance(value, list | tuple):
                tensors |= {f"{name}[{i}]": item for i, item in enumerate(value) if isinstance(item, Tensor)}
        return tensors

    @property
    def backward(self) -> Backward | None:
        """`backward(grads, args, kwargs, outputs)`: one gradient per tensor of `inputs`, None where there is none."""
        return None if self.gradients is None else self._backward

    def _backward(
        self,
        grads: Sequence[Tensor | None],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outputs: Any,  # noqa: ANN401
    ) -> tuple[Tensor | None, ...]:
        names = self.inputs(args, kwargs)
        if self.gradients is None or grads[0] is None:  # every formula here reads the first output's gradient alone
            return (None,) * len(names)
        found = self.gradients(grads, self.bind(args, kwargs), outputs)
        return tuple(found.get(name) for name in names)


def wide(*tensors: Tensor | None) -> torch.dtype:
    """The dtype that kernels compute in: float32, or float64 as soon as one tensor is float64 (the truth)."""
    is_truth = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if is_truth else torch.float32

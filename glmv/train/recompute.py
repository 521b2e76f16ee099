"""Activation recomputation: chosen modules keep their inputs only, and run again in the backward pass.

The wrapper stands inside the module's `forward`. FSDP's hooks are around it: they gather the weights before the
recomputation begins and reduce gradients once it has ended. Under expert parallelism the second run exchanges rows
again; all ranks do, since it always runs to its end and sees the experts that the forward pass chose.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from glmv.config.features import FeaturesConfig
from glmv.model.moe import Router
from glmv.ops.registry import say_once
from glmv.parallel.patterns import select_modules

KEY = "features.recompute_plan.apply_modules"
# What a plan without modules means.
BLOCKS = ("model.language_model.layers.{*}", "model.visual.blocks.{*}")

Choose = Callable[[Tensor], Tensor]


def apply_recompute(model: nn.Module, config: FeaturesConfig) -> list[str]:
    """Wrap what `features.recompute_plan` names, in place and before FSDP; return the names, parents first.

    Raises:
        PatternError: a pattern matches no module.
    """
    if not config.recompute:
        return []
    plan = config.recompute_plan
    modules = select_modules(model, plan.apply_modules or BLOCKS, key=KEY)
    for name, module in modules.items():
        module.forward = Recomputed(name, module, plan.use_reentrant)
    return list(modules)


class Recomputed:
    """A module's `forward` that keeps its inputs and forgets the rest.

    Args:
        reentrant: use torch's reentrant checkpointing, where an input requires a gradient. Where none does, as behind
            a frozen prefix, it would give the module's own weights no gradient, and the other kind is used.
    """

    def __init__(self, name: str, module: nn.Module, reentrant: bool) -> None:
        self.name = name
        self.forward: Callable[..., Any] = module.forward
        self.routers = [below for below in module.modules() if isinstance(below, Router)]
        self.reentrant = reentrant

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401 - whatever the module takes and gives
        """Run the module; its second run comes with the backward pass."""
        run = Repeated(self.forward, self.routers)
        if self.reentrant and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            return checkpoint(run, *args, use_reentrant=True, preserve_rng_state=False)
        if self.reentrant:
            say_once(
                f"features.recompute_plan.use_reentrant: no input of {self.name} has a gradient; "
                "it is recomputed in the other way (same result)"
            )
        # An early stop would end the second run somewhere between two exchanges.
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, early_stop=False)


class Repeated:
    """One call of a module, made twice: the second time its routers choose what they chose the first time.

    A near tie that fell otherwise would send other rows than those whose gradients come back.
    """

    def __init__(self, forward: Callable[..., Any], routers: Sequence[Router]) -> None:
        self.forward = forward
        self.routers = routers
        self.choices: list[Tensor] = []
        self.remembers = False

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401 - whatever the module takes and gives
        """Run the module, the first time or again."""
        chosen = iter(self.choices) if self.remembers else None
        self.remembers = True

        def choose(choice_TE: Tensor, own: Choose) -> Tensor:
            if chosen is not None:
                return next(chosen)
            self.choices.append(own(choice_TE))
            return self.choices[-1]

        with choosing(self.routers, choose):
            return self.forward(*args)


@contextlib.contextmanager
def choosing(routers: Sequence[Router], choose: Callable[[Tensor, Choose], Tensor]) -> Iterator[None]:
    """Let `choose` stand for every router's own choice, which it is given."""
    own = [router.choose for router in routers]
    try:
        for router, method in zip(routers, own, strict=True):
            router.choose = _bound(choose, method)  # type: ignore[method-assign,assignment]
        yield
    finally:
        for router, method in zip(routers, own, strict=True):
            router.choose = method  # type: ignore[method-assign]


def _bound(choose: Callable[[Tensor, Choose], Tensor], own: Choose) -> Choose:
    return lambda choice_TE: choose(choice_TE, own)

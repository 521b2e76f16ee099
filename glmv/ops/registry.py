"""One operator, several implementations, chosen in one place."""

import functools
import logging
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

logger = logging.getLogger("glmv.ops")


@functools.cache
def say_once(message: str, level: int = logging.WARNING) -> None:
    """Log `message` the first time it is given in this process, and never again."""
    logger.log(level, message)


class Operator(Generic[Arguments, Result]):
    """A callable that hands its arguments to the newest registered implementation whose `when` accepts them.

    `when` sees exactly the operator's own arguments, so an implementation may depend on device, dtype, shape or option:

        experts.register("grouped", when=lambda *tensors, grouped: grouped)(grouped_experts)
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.implementations: dict[str, tuple[Callable[Arguments, bool], Callable[Arguments, Result]]] = {}

    def register(
        self, name: str, *, when: Callable[Arguments, bool]
    ) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
        """Add an implementation under `name` (a second one of the same name replaces the first)."""

        def add(implementation: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
            self.implementations.pop(name, None)
            self.implementations[name] = (when, implementation)
            return implementation

        return add

    def choose(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> str:
        """Name of the implementation that these arguments get.

        Raises:
            LookupError: no implementation accepts them.
        """
        for name, (when, _) in reversed(self.implementations.items()):
            if when(*args, **kwargs):
                return name
        raise LookupError(f"{self.name}: none of {', '.join(self.implementations)} accepts these arguments")

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Run the chosen implementation."""
        return self.implementations[self.choose(*args, **kwargs)][1](*args, **kwargs)

"""What every section of a training config has in common."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
"""How many of something there are: never none."""

Step = Annotated[int, Field(ge=0)]
"""A number of steps, layers or samples that may be zero."""

Ratio = Annotated[float, Field(ge=0, le=1)]
"""A share of something, from 0 to 1."""

Positive = Annotated[float, Field(ge=0)]
"""A number that may be zero and is never negative."""

DTypeName = Literal["bf16", "fp16", "fp32", "fp64"]
"""Number formats by the names of the YAML; `fp64` is for verification on the CPU."""


class Section(BaseModel):
    """One mapping of the YAML: typed, frozen, and closed to keys that it does not know.

    Types are strict: `"1"` is no integer and `1` is no boolean. Every key carries a description (its docstring).
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class ModulePlan(Section):
    """Which modules a feature is applied to."""

    apply_modules: list[str] = Field(default_factory=list)
    """Module patterns: `{*}` stands for one integer, `{a-b}` for an integer range, `*` for any characters."""

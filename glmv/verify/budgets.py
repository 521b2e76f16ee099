"""How far a healthy result may be from the truth: a multiple of measured noise, never a typed tolerance.

allowed = ratio x max(noise, floor)

- noise: RMS error of equally legitimate arithmetic (`spec.numerics.Policy(draw=...)`) against float64, over all draws.
- floor: what a single rounding costs even where the draws were lucky.
- ratio: from the table below, with its reason. It covers what the draws leave out: other summation orders inside the
  kernels, and the tail of a maximum over thousands of elements.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import torch

FIGURES = ("rel-L2", "max-norm", "projection")


@dataclass(frozen=True)
class BudgetClass:
    """Tensors that round alike.

    Attributes:
        name: what reports print.   pattern: searched in the tensor's published name.
        rel_l2, max_norm, projection: ratio for each figure.   reason: why these ratios.
    """

    name: str
    pattern: str
    rel_l2: float
    max_norm: float
    projection: float
    reason: str

    def ratio(self, figure: str) -> float:
        """The ratio of one of `FIGURES`."""
        return {"rel-L2": self.rel_l2, "max-norm": self.max_norm, "projection": self.projection}[figure]


CLASSES = (
    BudgetClass("everything", r"^all tensors$", 3, 6, 5, "one sample of a sum over all elements: nearly Gaussian"),
    BudgetClass("loss", r"^loss$", 6, 6, 6, "a single number: one sample of its noise, not a mean of many"),
    BudgetClass("experts", r"\.experts\.\d+\.", 4, 6, 6, "few tokens an expert: the spread between experts is wide"),
    BudgetClass("router", r"\.mlp\.gate\.", 4, 6, 6, "small differences of large terms after normalisation"),
    BudgetClass("bias", r"bias$", 4, 6, 6, "one long sum over tokens; half of k_proj.bias is zero by symmetry"),
    BudgetClass("norm", r"norm\d?\.weight$", 4, 6, 6, "one long sum over tokens for each element"),
    BudgetClass("vision", r"model\.visual\.", 3, 6, 6, "deepest backward path: through every text layer"),
    BudgetClass("embedding", r"embed_tokens", 3, 6, 6, "rows of rare tokens come from a single position"),
    BudgetClass("matrix", r".", 3, 6, 6, "plain matmuls: only the order of sums differs"),
)


@functools.cache
def classify(name: str) -> BudgetClass:
    """The first class whose pattern is found in `name`."""
    return next(c for c in CLASSES if re.search(c.pattern, name))


def floor(figure: str, dtype: torch.dtype, reduction: int, elements: int) -> float:
    """u(dtype) + eps(accumulator) x sqrt(reduction): one rounding of the result and one random-walk sum behind it.

    Roundings of single elements average out in the projection, which therefore has u(dtype) / sqrt(elements).

    Args:
        dtype: compute dtype of the candidate.   reduction: length of a typical sum behind the tensor.
        elements: number of elements of the tensor.
    """
    accumulator = torch.promote_types(dtype, torch.float32)
    rounding = torch.finfo(dtype).eps / 2
    if figure == "projection":
        rounding /= elements**0.5
    return rounding + torch.finfo(accumulator).eps * reduction**0.5

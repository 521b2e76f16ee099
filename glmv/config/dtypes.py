"""Names of number formats as the YAML writes them, and what torch calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glmv.config.section import DTypeName

if TYPE_CHECKING:
    import torch

_TORCH = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def torch_dtype(name: DTypeName | None) -> torch.dtype | None:
    """The torch dtype of a name; None stays None (the tensor keeps the dtype it has)."""
    # Here, so that a config is read, and refused, without the seconds that importing torch takes.
    import torch

    return None if name is None else getattr(torch, _TORCH[name])

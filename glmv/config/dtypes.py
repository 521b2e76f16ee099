"""Names of number formats as the YAML writes them, and what torch calls them."""

import torch

from glmv.config.section import DTypeName

_TORCH: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def torch_dtype(name: DTypeName | None) -> torch.dtype | None:
    """The torch dtype of a name; None stays None (the tensor keeps the dtype it has)."""
    return None if name is None else _TORCH[name]

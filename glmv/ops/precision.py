"""The dtype in which sums, norms, angles and routing are computed."""

import torch


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """fp32 for bf16, fp16 and fp32; float64 for float64, so that a float64 model is float64 throughout."""
    return torch.promote_types(dtype, torch.float32)

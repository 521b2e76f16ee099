"""Random numbers and determinism."""

import os

import torch


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seed torch on every device, alike on all ranks: ranks differ in their samples and in nothing else.

    Args:
        deterministic: use deterministic kernels and collectives only; torch raises where an operator has none.
    """
    torch.manual_seed(seed)
    if deterministic:
        # Read by cuBLAS and by HCCL when they start.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("HCCL_DETERMINISTIC", "true")
    torch.use_deterministic_algorithms(deterministic)

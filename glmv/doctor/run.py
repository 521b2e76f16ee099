"""The whole examination."""

from __future__ import annotations

from glmv.doctor import ascend, hardware, kernels, software, tiers
from glmv.doctor.fact import Fact, collect

COLLECTORS = (
    (software.PART, (software.python, software.torch, software.transformers, software.compiler)),
    (ascend.PART, (ascend.torch_npu, ascend.cann)),
    (hardware.PART, (hardware.cpu, hardware.cuda, hardware.npu, hardware.backends)),
    (kernels.PART, (kernels.kernels,)),
    (tiers.PART, (tiers.tiers,)),
)


def examine() -> list[Fact]:
    """Every fact, part after part. Never raises: what goes wrong is a fact."""
    return [fact for part, collectors in COLLECTORS for collector in collectors for fact in collect(part, collector)]

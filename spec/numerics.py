"""Which dtype each rounding point has, and how the size of rounding noise is sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Policy:
    """How arithmetic rounds.

    Attributes:
        compute: dtype of weights and activations in matmuls: float64 for truth, float32 or bfloat16 to model the
            machine.
        draw: None computes plainly. An int computes one sample of equally legitimate arithmetic instead: inputs moved
            by at most one ulp and every contraction summed in a random order. The error of the samples is the noise
            that no implementation under this policy can be blamed for.
        buffers: dtype that rotary frequencies are rounded to, as Megatron's bf16 wrapper does; None leaves them wide.
    """

    compute: torch.dtype = torch.float64
    draw: int | None = None
    buffers: torch.dtype | None = None
    generator: torch.Generator | None = field(init=False, compare=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if self.draw is not None:
            object.__setattr__(self, "generator", torch.Generator().manual_seed(self.draw))

    @property
    def wide(self) -> torch.dtype:
        """dtype of what the model keeps in fp32 whatever the compute dtype: norms, softmax, router, loss."""
        return torch.promote_types(self.compute, torch.float32)

    def round(self, x: Tensor) -> Tensor:
        """`x` in the compute dtype."""
        return x.to(self.compute)

    def widen(self, x: Tensor) -> Tensor:
        """`x` in the wide dtype."""
        return x.to(self.wide)

    def enter(self, x: Tensor) -> Tensor:
        """An input of the network in the compute dtype; in a draw, moved by up to half an ulp before it is rounded."""
        if self.generator is None:
            return self.round(x)
        ulps = torch.rand(x.shape, generator=self.generator, dtype=self.wide) - 0.5
        return self.round(self.widen(x) * (1 + ulps * torch.finfo(self.compute).eps))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, policy: Policy) -> Tensor:
    """x [..., K] @ weight [N, K]^T + bias [N], in the compute dtype."""
    x, weight = policy.round(x), policy.round(weight)
    if policy.generator is not None:
        order = torch.randperm(x.shape[-1], generator=policy.generator)
        x, weight = x[..., order], weight[:, order]
    return F.linear(x, weight, None if bias is None else policy.round(bias))


def rms_norm(x: Tensor, weight: Tensor, eps: float, policy: Policy) -> Tensor:
    """x / rms(x) in the wide dtype, rounded, then scaled by the weight (the order HF's models use)."""
    wide = policy.widen(x)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return policy.round(weight) * policy.round(wide)


def swiglu_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, policy: Policy) -> Tensor:
    """down(silu(gate(x)) * up(x)); weights in nn.Linear's layout (Shazeer, arXiv 2002.05202)."""
    return linear(F.silu(linear(x, gate, None, policy)) * linear(x, up, None, policy), down, None, policy)


def attend(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float, policy: Policy) -> Tensor:
    """Softmax attention in the wide dtype, rounded once.

    Args:
        query, key, value: [..., S, D].
        allowed: bool, broadcasts to [..., S, S]; a row that may look nowhere gives zeros.
    """
    score = policy.widen(query) @ policy.widen(key).transpose(-1, -2) * scale
    score = score.masked_fill(~allowed, float("-inf"))
    blind = ~allowed.any(-1, keepdim=True)
    probability = score.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return policy.round(probability @ policy.widen(value))

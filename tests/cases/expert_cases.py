"""Routings that break experts, and what machine and law say about each."""
# Shapes: T tokens, H hidden, K experts per token, E experts, I intermediate, F = 2I.

import math
from dataclasses import dataclass

import torch
from op_cases import DTYPES, draw, leaf
from torch import Tensor

from glmv.ops.experts import experts
from glmv.ops.kernels import Kernels
from spec import layout
from spec.experts import experts as law_experts
from spec.numerics import Policy

HIDDEN, INNER, EXPERTS = 48, 40, 6  # pairwise different, as are H, I, 2I; strides are multiples of 16 bytes in bf16

# Experts of each token.
ROUTINGS = {
    "balanced": [[0, 1], [2, 3], [4, 5], [1, 2], [3, 4], [5, 0], [0, 3]],
    "empty_first": [[1, 2], [3, 4], [5, 1], [4, 2], [2, 5]],
    "empty_middle": [[0, 1], [5, 4], [1, 5], [4, 0], [0, 5]],
    "empty_last": [[0, 1], [2, 3], [4, 0], [3, 1]],
    "only_first": [[0, 1]] * 5,
    "only_last": [[5, 4]] * 3,
    "one_token": [[3, 1]],
    "top_1": [[3], [0], [3], [5]],
    "one_expert": [[4]] * 5,
    "all_experts": [[5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5]],
}


@dataclass
class Case:
    """Inputs of one call, float64 values that bf16 can hold, and the gradient that comes back."""

    hidden_TH: Tensor
    top_k_index_TK: Tensor
    top_k_weight_TK: Tensor
    gate_up_EHF: Tensor
    down_EIH: Tensor
    grad_TH: Tensor

    def machine(self, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> dict[str, Tensor]:
        """Output and gradients of the machine; routing weights in fp32 or wider."""
        hidden, gate_up, down = (leaf(x, dtype, device) for x in (self.hidden_TH, self.gate_up_EHF, self.down_EIH))
        weight = leaf(self.top_k_weight_TK, torch.promote_types(dtype, torch.float32), device)
        output = experts(hidden, self.top_k_index_TK.to(device), weight, gate_up, down, kernels)
        output.backward(self.grad_TH.to(dtype).to(device))
        stacked = {"mlp.experts.gate_up_proj": gate_up.grad, "mlp.experts.down_proj": down.grad}
        named = {"output": output.detach(), "hidden": hidden.grad, "top_k_weight": weight.grad}
        return named | layout.per_expert(stacked)

    def law(self, policy: Policy) -> dict[str, Tensor]:
        """The same from the law."""
        stacked = {"mlp.experts.gate_up_proj": self.gate_up_EHF, "mlp.experts.down_proj": self.down_EIH}
        leaves = {name: leaf(w, policy.wide) for name, w in layout.per_expert(stacked).items()}
        each = [
            [leaves[f"mlp.experts.{expert}.{part}_proj.weight"] for expert in range(len(self.down_EIH))]
            for part in ("gate", "up", "down")
        ]
        hidden, weight = leaf(self.hidden_TH, policy.wide), leaf(self.top_k_weight_TK, policy.wide)
        output = law_experts(policy.enter(hidden), self.top_k_index_TK, weight, *each, policy)
        output.backward(policy.round(self.grad_TH))
        grads = {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in leaves.items()}
        return {"output": output.detach(), "hidden": hidden.grad, "top_k_weight": weight.grad, **grads}


def make_case(routing: str, seed: int = 7) -> Case:
    """Random numbers under one of `ROUTINGS`."""
    return drawn_case(ROUTINGS[routing], EXPERTS, HIDDEN, INNER, seed)


def drawn_case(routing: list[list[int]], experts: int, hidden: int, inner: int, seed: int) -> Case:
    """Random numbers of these sizes; `routing` lists the experts of each token."""
    index_TK = torch.tensor(routing)
    return Case(
        hidden_TH=draw(len(index_TK), hidden, seed=seed),
        top_k_index_TK=index_TK,
        top_k_weight_TK=draw(*index_TK.shape, seed=seed + 1).sigmoid().float().double(),
        gate_up_EHF=draw(experts, hidden, 2 * inner, seed=seed + 2) / 8,
        down_EIH=draw(experts, inner, hidden, seed=seed + 3) / 8,
        grad_TH=draw(len(index_TK), hidden, seed=seed + 4),
    )


WEIGHTS = (EXPERTS, HIDDEN, 2 * INNER), (EXPERTS, INNER, HIDDEN)


def poison(device: torch.device, *shapes: tuple[int, ...]) -> None:
    """Leave NaN in the memory that the next tensors of these shapes (or of `make_case`'s) will be given."""
    sizes = [math.prod(shape) for shape in shapes or (*WEIGHTS, *((n, HIDDEN) for n in range(1, 15)))]
    held = [
        torch.full((size,), float("nan"), dtype=dtype, device=device)
        for size in sizes
        for dtype in DTYPES
        for _ in range(4)
    ]
    del held

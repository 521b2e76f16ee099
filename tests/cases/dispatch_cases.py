"""One layer's experts over ranks: tokens that are spread unevenly, routings that leave ranks without work."""
# Shapes: T tokens, H hidden, K experts per token, E experts, I intermediate, F = 2I, P ranks.

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from glmv.ops.experts import experts
from glmv.ops.kernels import Kernels
from glmv.parallel.balance import BalancedAllToAll
from glmv.parallel.dispatch import AllGather, AllToAll
from spec import layout
from spec.experts import experts as law_experts

EXPERTS, HIDDEN, INNER, TOP_K, TOKENS = 8, 48, 40, 2, 9  # strides are multiples of 16 bytes in bf16
DISPATCHERS = {"alltoall": AllToAll, "allgather": AllGather, "balance": lambda mesh: BalancedAllToAll(mesh, most=2)}
# Tokens of each of four ranks (two take the first two), and the experts that they choose among.
CASES = {
    "even": ([9, 7, 8, 6], range(8)),
    "uneven": ([1, 14, 3, 5], range(8)),
    "all_to_first_rank": ([5, 6, 4, 7], range(2)),
    "all_to_last_rank": ([5, 6, 4, 7], range(6, 8)),
    "middle": ([5, 6, 4, 7], range(3, 5)),
    "rank_1_has_nothing": ([6, 0, 5, 4], range(8)),
    "rank_1_has_everything": ([0, 9, 0, 0], range(8)),
    "rank_0_alone_to_the_last": ([7, 0, 0, 0], range(6, 8)),
}


@dataclass
class Layer:
    """All ranks' tokens in the order of ranks, float64 values that bf16 can hold, and the gradient that comes back."""

    tokens: list[int]
    hidden_TH: Tensor
    top_k_index_TK: Tensor
    top_k_weight_TK: Tensor
    gate_up_EHF: Tensor
    down_EIH: Tensor
    grad_TH: Tensor

    def law(self, policy):
        """Output and gradients of all ranks' tokens together."""
        stacked = {"mlp.experts.gate_up_proj": self.gate_up_EHF, "mlp.experts.down_proj": self.down_EIH}
        leaves = {name: leaf(w, policy.wide) for name, w in layout.per_expert(stacked).items()}
        each = [
            [leaves[f"mlp.experts.{expert}.{part}_proj.weight"] for expert in range(EXPERTS)]
            for part in ("gate", "up", "down")
        ]
        hidden, weight = leaf(self.hidden_TH, policy.wide), leaf(self.top_k_weight_TK, policy.wide)
        output = law_experts(policy.enter(hidden), self.top_k_index_TK, weight, *each, policy)
        output.backward(policy.round(self.grad_TH))
        grads = {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in leaves.items()}
        return {"output": output.detach(), "hidden": hidden.grad, "top_k_weight": weight.grad, **grads}


def leaf(values: Tensor, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """A copy that collects a gradient."""
    return values.detach().to(device, dtype, copy=True).requires_grad_()


def draw_layer(case: str, ranks: int, seed: int = 3) -> Layer:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    tokens, among = CASES[case][0][:ranks], torch.tensor(CASES[case][1])
    total = sum(tokens)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).bfloat16().double()

    return Layer(
        tokens=tokens,
        hidden_TH=draw(total, HIDDEN),
        top_k_index_TK=among[torch.rand(total, len(among), generator=generator).argsort(1)[:, :TOP_K]],
        top_k_weight_TK=draw(total, TOP_K).sigmoid().float().double(),
        gate_up_EHF=draw(EXPERTS, HIDDEN, 2 * INNER) / 8,
        down_EIH=draw(EXPERTS, INNER, HIDDEN) / 8,
        grad_TH=draw(total, HIDDEN),
    )


@dataclass
class Part:
    """What one rank puts in and gets out."""

    hidden_TH: Tensor
    top_k_weight_TK: Tensor
    gate_up_EHF: nn.Parameter
    down_EIH: nn.Parameter
    output_TH: Tensor

    def said(self) -> dict[str, Tensor]:
        """This rank's share of everything that the law says."""
        return {
            "output": self.output_TH.detach(),
            "hidden": self.hidden_TH.grad,
            "top_k_weight": self.top_k_weight_TK.grad,
            "mlp.experts.gate_up_proj": self.gate_up_EHF.grad.to_local(),
            "mlp.experts.down_proj": self.down_EIH.grad.to_local(),
        }


def run_part(layer: Layer, dispatcher, mesh: DeviceMesh, dtype: torch.dtype, grouped: bool) -> Part:
    """Collective: this rank's tokens forward and backward."""
    rank, device = mesh.get_local_rank(), mesh.device_type
    own = slice(sum(layer.tokens[:rank]), sum(layer.tokens[: rank + 1]))
    hidden_TH = leaf(layer.hidden_TH[own], dtype, device)
    weight_TK = leaf(layer.top_k_weight_TK[own], torch.promote_types(dtype, torch.float32), device)
    index_TK = layer.top_k_index_TK[own].to(device)
    weights = [
        nn.Parameter(distribute_tensor(stacked.to(device, dtype), mesh, [Shard(0)], src_data_rank=None))
        for stacked in (layer.gate_up_EHF, layer.down_EIH)
    ]
    output_TH = experts(hidden_TH, index_TK, weight_TK, *weights, Kernels(grouped=grouped), dispatcher)
    output_TH.backward(layer.grad_TH[own].to(device, dtype))
    return Part(hidden_TH, weight_TK, *weights, output_TH)


def gather_whole(part: Part) -> dict[str, Tensor]:
    """Collective: the parts of all ranks together, under the law's names."""
    parts: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, {name: tensor.cpu() for name, tensor in part.said().items()})
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    stacked = {name: joined.pop(name) for name in list(joined) if "experts" in name}
    return joined | layout.per_expert(stacked)

"""The exchange fused into the NPU's grouped matmuls: rows are sent while those that have arrived are multiplied.

    npu_alltoallv_gmm    sends rows to their experts' ranks, sorts what arrives by expert, multiplies by gate_up
    npu_gmm_alltoallv    multiplies by down, and sends the products back

Each is the other's way back: the backward pass of one runs the other, on the transposed weight. Neither operator has a
gradient of its own.
Source: op-plugin's documentation of both operators, and the checks of aclnnAlltoAllvGroupedMatMul on the host.
"""
# Shapes: R rows that this rank routes, N rows that its experts get, H hidden, I intermediate, F = 2I, E experts, e
# experts of a rank, P ranks, K contracted, M produced.

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh

from glmv.ops.kernels import Kernels
from glmv.ops.npu.grouped_matmul import weight_gradient
from glmv.ops.npu.library import torch_npu
from glmv.ops.npu.swiglu import swiglu_of_halves
from glmv.parallel.dispatch import AllToAll, local

RANKS = (2, 4, 8, 16, 32, 64, 128, 256)  # what torch_npu lets pass; CANN then looks at the chip, in the first step
RANKS_OF_CHIPS = {"Ascend910B": (), "Ascend910_93": (8, 16, 32, 64, 128), "Ascend950": (2, 4, 8, 16, 32, 64)}
MOST_EXPERTS, MOST_LOCAL_EXPERTS = 256, 32
DTYPES = ("bf16", "fp16")


def why_not(mesh: DeviceMesh, dtype: str | None, experts: int) -> str | None:
    """`why_unsupported` of the ranks of `mesh`, by the name of their chip."""
    on_npus = mesh.device_type == "npu"
    chip = torch.get_device_module("npu").get_device_name() if on_npus else ""
    return why_unsupported(mesh.device_type, chip, dtype, mesh.size(), experts)


def why_unsupported(device: str, chip: str, dtype: str | None, ranks: int, experts: int) -> str | None:
    """Why the fused exchange cannot run; None when it can.

    Args:
        device: type of the ranks' devices.   chip: its name; one that `RANKS_OF_CHIPS` lacks is given `RANKS`.
        dtype: compute dtype by its name in the config.
    """
    if device != "npu":
        return f"it is an operator of NPUs, and the ranks are on {device}"
    if dtype not in DTYPES:
        return f"it multiplies {' and '.join(DTYPES)}, and parallel.fsdp_plan.param_dtype = {dtype or 'null'}"
    taken = next((taken for name, taken in RANKS_OF_CHIPS.items() if chip.startswith(name)), RANKS)
    if not taken:
        return f"{chip} does not have it; Atlas A3 does"
    if ranks not in taken:
        return f"parallel.expert_parallel_size = {ranks} is none of {', '.join(map(str, taken))} on {chip}"
    if experts > MOST_EXPERTS or experts // ranks > MOST_LOCAL_EXPERTS:
        return f"{experts} experts on {ranks} ranks are more than {MOST_EXPERTS}, or {MOST_LOCAL_EXPERTS} on a rank"
    return None


@dataclass(frozen=True)
class Channel:
    """One layer's exchange: the communicator, and rows by (rank, expert of a rank), as both sides of it count them."""

    name: str
    ranks: int
    sent: list[int]
    arriving: list[int]
    ends_e: Tensor


class Mc2(AllToAll):
    """`AllToAll` inside of the matmuls. It sends the same rows, and counts for every expert:

        rows  = (R - kept) + (N - kept)
        bytes = rows x H x element + (P - 1) x E / P x 8

    in the forward pass. In the backward pass gradients of the outputs go there (H wide), those of the rows come back.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        backend = self.group._get_backend(torch.device(mesh.device_type))
        self.name: str = backend.get_hccl_comm_name(dist.get_rank())  # type: ignore[attr-defined]

    def __call__(
        self, rows_RH: Tensor, counts_E: Tensor, gate_up_eHF: Tensor, down_eIH: Tensor, *, kernels: Kernels
    ) -> Tensor:
        """Collective: see `Dispatcher`."""
        routed = len(rows_RH)
        if routed == 0:
            rows_RH, counts_E = self._one_row(rows_RH, counts_E)
        channel = self._channel(counts_E)
        hidden_NF = _SendAndMultiply.apply(rows_RH.contiguous(), local(gate_up_eHF), channel, self)
        output_RH = _MultiplyAndReturn.apply(swiglu_of_halves(hidden_NF), local(down_eIH), channel, self)
        return output_RH if routed else output_RH[:0]

    def _one_row(self, rows_0H: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
        """Zeros for this rank's own first expert: the operators refuse a rank that routes no row at all."""
        counts_E = counts_E.clone()
        counts_E[self.rank * (len(counts_E) // self.size)] += 1
        return torch.cat([rows_0H, rows_0H.new_zeros(1, rows_0H.shape[1])]), counts_E

    def _channel(self, counts_E: Tensor) -> Channel:
        """Tell each rank its counts. The layer's only synchronisation of host and device."""
        arriving_E = torch.empty_like(counts_E)
        dist.all_to_all_single(arriving_E, counts_E.contiguous(), group=self.group)
        self.traffic.bytes += (self.size - 1) * (len(counts_E) // self.size) * counts_E.element_size()
        sent, arriving = torch.stack([counts_E, arriving_E]).tolist()
        return Channel(self.name, self.size, sent, arriving, arriving_E.view(self.size, -1).sum(0).cumsum(0))

    def count(self, rows: Tensor, counts: list[int]) -> None:
        """Rows that leave this rank: `counts` by (rank, expert)."""
        held = len(counts) // self.size
        self.traffic.add(sum(counts) - sum(counts[self.rank * held : (self.rank + 1) * held]), rows)


class Context(FunctionCtx):
    """What forward leaves for backward."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    channel: Channel
    mc2: Mc2


def _send_and_multiply(
    rows_RK: Tensor, weight_eKM: Tensor, channel: Channel, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """Products [N, M] of what arrives, sorted by expert, and the sorted rows [N, K]."""
    product_NM, _, arrived_NK = torch_npu().npu_alltoallv_gmm(
        rows_RK,
        weight_eKM,
        channel.name,
        channel.ranks,
        channel.sent,
        channel.arriving,
        trans_gmm_weight=transposed,
        permute_out_flag=True,
    )
    return product_NM, arrived_NK


def _multiply_and_return(rows_NK: Tensor, weight_eKM: Tensor, channel: Channel, transposed: bool = False) -> Tensor:
    """Products [R, M], where their rows came from."""
    product_RM, _ = torch_npu().npu_gmm_alltoallv(
        rows_NK,
        weight_eKM,
        channel.name,
        channel.ranks,
        channel.arriving,
        channel.sent,
        trans_gmm_weight=transposed,
    )
    return product_RM


class _SendAndMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, rows_RH: Tensor, gate_up_eHF: Tensor, channel: Channel, mc2: Mc2) -> Tensor:
        mc2.count(rows_RH, channel.sent)
        hidden_NF, arrived_NH = _send_and_multiply(rows_RH, gate_up_eHF, channel)
        ctx.channel, ctx.mc2 = channel, mc2
        ctx.save_for_backward(arrived_NH, gate_up_eHF)
        return hidden_NF

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        arrived_NH, gate_up_eHF = ctx.saved_tensors
        grad_NF = grads[0].contiguous()
        ctx.mc2.count(arrived_NH, ctx.channel.arriving)
        grad_RH = _multiply_and_return(grad_NF, gate_up_eHF, ctx.channel, transposed=True)
        return grad_RH, _weight_gradient(ctx, arrived_NH, grad_NF, gate_up_eHF), None, None


class _MultiplyAndReturn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, hidden_NI: Tensor, down_eIH: Tensor, channel: Channel, mc2: Mc2) -> Tensor:
        output_RH = _multiply_and_return(hidden_NI.contiguous(), down_eIH, channel)
        mc2.count(output_RH, channel.arriving)
        ctx.channel, ctx.mc2 = channel, mc2
        ctx.save_for_backward(hidden_NI, down_eIH)
        return output_RH

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden_NI, down_eIH = ctx.saved_tensors
        ctx.mc2.count(grads[0], ctx.channel.sent)
        grad_NI, grad_NH = _send_and_multiply(grads[0].contiguous(), down_eIH, ctx.channel, transposed=True)
        return grad_NI, _weight_gradient(ctx, hidden_NI, grad_NH, down_eIH), None, None


def _weight_gradient(ctx: Context, rows_NK: Tensor, grad_NM: Tensor, weight_eKM: Tensor) -> Tensor | None:
    """None for frozen experts; zeros where no row came, which the kernel would leave unwritten."""
    if not ctx.needs_input_grad[1]:
        return None
    if len(rows_NK) == 0:
        return torch.zeros_like(weight_eKM)
    return weight_gradient(rows_NK, grad_NM, ctx.channel.ends_e)

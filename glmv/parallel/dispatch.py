"""How rows travel to the ranks that hold their experts, and back.

A dispatcher stands where `glmv.ops.experts.expert_mlp` stands without expert parallelism: rows in expert order in, the
experts' outputs in the same order out. Expert x of E lives on rank x // (E / P) of the P ranks of an `ep` mesh. Routing
weights never travel: they are applied where the token is, in fp32, by `glmv.ops.experts.combine`.

Every exchange is its own mirror image: the backward pass sends gradients the way that the rows came, on every rank,
whatever number of rows a rank has. A rank without rows, or without a token for its experts, skips nothing.
"""
# Shapes: R rows that this rank routes, N rows that its experts get, H hidden, E experts, e experts of a rank, P ranks,
# B blocks of rows, I intermediate, F = 2I.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from glmv.ops.experts import expert_mlp
from glmv.ops.kernels import Kernels


@dataclass
class Traffic:
    """What this rank has sent to other ranks, forward and backward, since it was last set to zero."""

    rows: int = 0
    bytes: int = 0

    def add(self, rows: int, like: Tensor) -> None:
        """Count `rows` rows of the shape and dtype of those in `like`."""
        self.rows += rows
        self.bytes += rows * like.shape[1:].numel() * like.element_size()

    def reset(self) -> None:
        """Begin anew."""
        self.rows = self.bytes = 0


@dataclass(frozen=True)
class Way:
    """One direction of an exchange.

    Attributes:
        before: in which order rows leave; None leaves them as they are.   after: which of the arrived rows stand where.
        send: rows to each rank.   receive: rows from each rank.
    """

    before: Tensor | None
    send: list[int]
    receive: list[int]
    after: Tensor | None


@dataclass(frozen=True)
class Plan:
    """Where all rows of one layer go: to the experts, and `back`; `counts_e`: rows of each of this rank's experts."""

    there: Way
    back: Way
    counts_e: Tensor


Move = Callable[[Tensor, Way], Tensor]


class Context(FunctionCtx):
    """What forward leaves for backward."""

    saved_tensors: tuple[Tensor | None, ...]
    move: Move
    sizes: tuple[list[int], list[int]]


class _Exchange(torch.autograd.Function):
    """Rows one way, gradients the other."""

    @staticmethod
    def forward(ctx: Context, rows: Tensor, move: Move, there: Way, back: Way) -> Tensor:
        # Saved and not kept: checkpointing then forgets them until the second run.
        ctx.save_for_backward(back.before, back.after)  # type: ignore[arg-type] # None is fine, and stays None
        ctx.move, ctx.sizes = move, (back.send, back.receive)
        return move(rows, there)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        before, after = ctx.saved_tensors
        return ctx.move(grads[0].contiguous(), Way(before, *ctx.sizes, after)), None, None, None


class Dispatcher(ABC):
    """Exchanges rows between the ranks of `mesh` around the experts of each; see the subclasses.

    Attributes:
        traffic: what this rank has sent.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.traffic = Traffic()

    def __call__(
        self, rows_RH: Tensor, counts_E: Tensor, gate_up_eHF: Tensor, down_eIH: Tensor, *, kernels: Kernels
    ) -> Tensor:
        """Collective: the experts' outputs of `rows_RH`, in the same order.

        Args:
            rows_RH: in the order of all E experts.   counts_E: rows of each of them, int64.
            gate_up_eHF, down_eIH: weights of this rank's experts, plain or a DTensor's shard.
        """
        plan = self.plan(counts_E)
        rows_NH = _Exchange.apply(rows_RH, self.move, plan.there, plan.back)
        outputs_NH = self.run(rows_NH, plan, local(gate_up_eHF), local(down_eIH), kernels)
        return _Exchange.apply(outputs_NH, self.move, plan.back, plan.there)

    def run(self, rows_NH: Tensor, plan: Plan, gate_up_eHF: Tensor, down_eIH: Tensor, kernels: Kernels) -> Tensor:
        """This rank's experts over the rows that came for them; if none came, their weights still get gradients."""
        return expert_mlp(rows_NH, plan.counts_e, gate_up_eHF, down_eIH, kernels=kernels)

    def all_counts(self, counts_E: Tensor) -> Tensor:
        """Collective: the counts [P, E] of all ranks."""
        gathered = counts_E.new_empty(self.size * len(counts_E))
        dist.all_gather_single(gathered, counts_E.contiguous(), group=self.group)
        self.traffic.bytes += (self.size - 1) * counts_E.numel() * counts_E.element_size()
        return gathered.view(self.size, -1)

    @abstractmethod
    def plan(self, counts_E: Tensor) -> Plan:
        """Collective: agree on where everybody's rows go. The layer's only synchronisation of host and device."""

    @abstractmethod
    def move(self, rows: Tensor, way: Way) -> Tensor:
        """Collective: send rows one way. Without autograd."""


class AllToAll(Dispatcher):
    """Every row goes to the one rank that holds its expert.

        rank 0   rows for experts  0 0 1 | 2 3 3          0 0 1 | 0 1          experts 0, 1:  0 0 0 1 1
        rank 1   rows for experts  0 1   | 2 2 3          2 3 3 | 2 2 3        experts 2, 3:  2 2 2 3 3 3
                                   to 0    to 1          from 0   from 1       sorted, run, and all the way back

    A rank sends, per layer, in the forward pass

        rows  = (R - kept) + (N - kept)              there and back; `kept`: rows whose expert lives here
        bytes = rows x H x element + (P - 1) x e x 8       with the counts of rows

    and the same rows, without counts, in the backward pass. With T tokens, K experts each and even routing that is
    2 x T x K x (P - 1) / P rows.
    """

    def plan(self, counts_E: Tensor) -> Plan:
        """Each rank tells the others how many rows it has for each of their experts."""
        counts_Pe = counts_E.view(self.size, -1)
        arriving_Pe = torch.empty_like(counts_Pe)
        dist.all_to_all_single(arriving_Pe, counts_Pe.contiguous(), group=self.group)
        self.traffic.bytes += (self.size - 1) * counts_Pe.shape[1] * counts_E.element_size()
        send, receive = torch.stack([counts_Pe.sum(1), arriving_Pe.sum(1)]).tolist()
        by_expert_B = torch.arange(arriving_Pe.numel(), device=counts_E.device).view_as(arriving_Pe).T.flatten()
        order_N, inverse_N = move_blocks(arriving_Pe.flatten(), by_expert_B, sum(receive))
        return Plan(
            there=Way(None, send, receive, order_N),
            back=Way(inverse_N, receive, send, None),
            counts_e=arriving_Pe.sum(0),
        )

    def move(self, rows: Tensor, way: Way) -> Tensor:
        """One all-to-all of uneven parts."""
        rows = rows if way.before is None else rows.index_select(0, way.before)
        arrived = rows.new_empty(sum(way.receive), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows, way.receive, way.send, group=self.group)
        self.traffic.add(sum(way.send) - way.send[self.rank], rows)
        return arrived if way.after is None else arrived.index_select(0, way.after)


class AllGather(Dispatcher):
    """Every rank gets all rows and runs those of its own experts; then every rank gets all outputs and keeps its own.

        rank 0   rows  0 0 1 2 3 3          0 0 1 . . .  0 1 . . .        experts 0, 1
                                    } all
        rank 1   rows  0 1 2 2 3            . . . 2 3 3  . . 2 2 3        experts 2, 3

    For links and libraries that are good at nothing else: its messages have one size, and it sends more. All ranks'
    rows are padded to the longest, and nothing is read from the padding. A rank sends, per layer, in the forward pass

        rows  = (P - 1) x (max R + max N)            maxima over the ranks
        bytes = rows x H x element + (P - 1) x E x 8       with the counts of rows

    and the same rows, without counts, in the backward pass.
    """

    def plan(self, counts_E: Tensor) -> Plan:
        """Every rank learns how many rows each has for each expert, and finds out where they stand."""
        on_device, counts_PE = counts_E.device, self.all_counts(counts_E).cpu()
        held = counts_PE.shape[1] // self.size
        routed_P = counts_PE.sum(1)
        run_P = counts_PE.view(self.size, self.size, held).sum((0, 2))
        # Blocks (rank, expert) as they stand among all gathered rows, and (expert, rank) among all gathered outputs.
        from_PE = _starts(counts_PE) + (torch.arange(self.size) * routed_P.max())[:, None]
        by_owner_PeP = counts_PE.T.reshape(self.size, held, self.size)
        to_PeP = _starts(by_owner_PeP.flatten(1)) + (torch.arange(self.size) * run_P.max())[:, None]
        to_PE = to_PeP.view(-1, self.size).T
        own = slice(self.rank * held, (self.rank + 1) * held)
        picked_N = _ranges(from_PE[:, own].T.flatten(), counts_PE[:, own].T.flatten()).to(on_device)
        picked_R = _ranges(to_PE[self.rank], counts_PE[self.rank]).to(on_device)
        routed, run = routed_P.tolist(), run_P.tolist()
        return Plan(
            there=Way(None, [routed[self.rank]], routed, picked_N),
            back=Way(None, [run[self.rank]], run, picked_R),
            counts_e=counts_PE[:, own].sum(0).to(on_device),
        )

    def move(self, rows: Tensor, way: Way) -> Tensor:
        """One all-gather of parts of the same size."""
        assert way.after is not None, "nobody keeps everybody's rows"
        longest = max(way.receive)
        everything = rows.new_empty(self.size * longest, *rows.shape[1:])
        dist.all_gather_single(everything, F.pad(rows, (0, 0, 0, longest - len(rows))), group=self.group)
        self.traffic.add((self.size - 1) * longest, rows)
        return everything.index_select(0, way.after)


DISPATCHERS: dict[str, type[Dispatcher]] = {"alltoall": AllToAll, "allgather": AllGather}


def local(weight: Tensor) -> Tensor:
    """This rank's part of a weight; its gradient becomes the whole's again."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def move_blocks(sizes_B: Tensor, order_B: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Put blocks of rows into another order, keeping the rows of each together.

    Args:
        sizes_B: rows of each block, int64, in the order in which they stand.   order_B: which block comes where.
        total: the sum of the sizes; given, so that nothing has to wait for the device.
    Returns:
        For every row of the new order where it stood, and for every row of the old order where it goes.
    """
    starts_B, moved_B = _starts(sizes_B), sizes_B[order_B]
    shift_B = starts_B[order_B] - _starts(moved_B)
    back_B = torch.empty_like(shift_B)
    back_B[order_B] = -shift_B
    row = torch.arange(total, device=sizes_B.device)
    return (
        row + shift_B.repeat_interleave(moved_B, output_size=total),
        row + back_B.repeat_interleave(sizes_B, output_size=total),
    )


def _starts(sizes: Tensor) -> Tensor:
    """Where each of consecutive blocks begins, along the last dimension."""
    return sizes.cumsum(-1) - sizes


def _ranges(starts_B: Tensor, sizes_B: Tensor) -> Tensor:
    """The numbers of all blocks' rows, one block after another."""
    return (starts_B - _starts(sizes_B)).repeat_interleave(sizes_B) + torch.arange(int(sizes_B.sum()))

"""Hot experts run on several ranks at once: for one layer and one pass, idle ranks borrow copies of their weights.

    rows of the experts   0: 90   1: 6 | 2: 2   3: 2          rank 0 has 96 rows, rank 1 has 4
    expert 0 is lent to rank 1, with 46 of its rows           rank 0 has 50 rows, rank 1 has 50

All ranks see the same counts and so decide alike. Nothing outlives the pass: the weights are lent again for the next
layer, micro-batch, recomputation or evaluation, and the gradients of a copy go back to the owner at once.
"""
# Shapes: N rows that this rank runs, H hidden, E experts, e experts of a rank, P ranks, S slots of a rank (its own
# experts, then those it borrows), B blocks of rows, n copies, I intermediate, F = 2I.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh

from glmv.ops.experts import expert_mlp
from glmv.ops.kernels import Kernels
from glmv.ops.precision import at_least_fp32
from glmv.parallel.dispatch import AllToAll, Move, Plan, Way, move_blocks

Counts = list[list[int]]


@dataclass(frozen=True)
class Copies:
    """Who runs what: `slots[d]` are the experts of rank d, its own and then the borrowed ones, both ascending.

    `rows[s][x]` maps the ranks that rank s sends rows of expert x to, to how many.
    """

    slots: list[list[int]]
    rows: list[list[dict[int, int]]]

    def load(self) -> list[int]:
        """Rows that each rank runs."""
        load = [0] * len(self.slots)
        for from_rank in self.rows:
            for split in from_rank:
                for rank, rows in split.items():
                    load[rank] += rows
        return load


def place_copies(counts_PE: Counts, most: int) -> Copies:
    """Decide greedily which experts are copied where, and whose rows go to the copies.

    As long as some rank has more rows than the mean, the most loaded expert of the most loaded rank is copied to the
    least loaded rank that may hold another copy, with as many rows as bring one of the two to the mean. That rank's own
    rows move first (they need no sending), then those of the ranks that have most of them.

    Args:
        counts_PE: rows of each rank for each expert.   most: copies that one rank may hold.
    """
    ranks, experts = len(counts_PE), len(counts_PE[0])
    held = experts // ranks
    rows = [[{expert // held: count} for expert, count in enumerate(counts)] for counts in counts_PE]
    at_home = [sum(counts[expert] for counts in counts_PE) for expert in range(experts)]
    load = [sum(at_home[rank * held : (rank + 1) * held]) for rank in range(ranks)]
    borrowed: list[set[int]] = [set() for _ in range(ranks)]
    mean = -(-sum(load) // ranks)  # rounded up: below it nobody can be
    while True:
        hot = max(range(ranks), key=lambda rank: load[rank])
        expert = max(range(hot * held, (hot + 1) * held), key=lambda x: at_home[x])
        free = [rank for rank in range(ranks) if len(borrowed[rank]) < most and expert not in borrowed[rank]]
        cold = min((rank for rank in free if rank != hot), key=lambda rank: load[rank], default=hot)
        moved = min(load[hot] - mean, mean - load[cold], at_home[expert])
        if moved <= 0:
            break
        borrowed[cold].add(expert)
        at_home[expert] -= moved
        load[hot] -= moved
        load[cold] += moved
        _move_rows([from_rank[expert] for from_rank in rows], hot, cold, moved)
    return Copies([[*range(r * held, (r + 1) * held), *sorted(borrowed[r])] for r in range(ranks)], rows)


def _move_rows(rows: Sequence[dict[int, int]], home: int, to: int, moved: int) -> None:
    """Send `moved` rows of one expert to a copy instead of home; `rows` says where each rank's go."""
    for source in sorted(range(len(rows)), key=lambda rank: (rank != to, -rows[rank][home], rank)):
        taken = min(moved, rows[source][home])
        rows[source][home] -= taken
        rows[source][to] = taken
        moved -= taken


@dataclass(frozen=True)
class Loan:
    """Weights that travel: `lent` local experts in the order of their borrowers, and how many come and go by rank."""

    lent: list[int]
    send: list[int]
    receive: list[int]


@dataclass(frozen=True)
class BalancedPlan(Plan):
    """`counts_e` covers all slots; `own_rows` are those of this rank's own experts. `loan` is None without any copy."""

    own_rows: int
    loan: Loan | None


class BalancedAllToAll(AllToAll):
    """`AllToAll`, with copies of hot experts on idle ranks.

    A rank sends, per layer, in the forward pass

        rows  = (R - kept) + (N - kept)             as `AllToAll`; kept: rows that this rank runs itself
        bytes = rows x H x element + (P - 1) x E x 8 + lent x (H x F + I x H) x element

    and in the backward pass the same rows, and a gradient for every copy that it borrowed.

    Args:
        most: copies that one rank may hold at a time.
    Attributes:
        loads: of every pass, rows of the most loaded rank by the mean over ranks: without copies, and with them.
    """

    def __init__(self, mesh: DeviceMesh, most: int) -> None:
        super().__init__(mesh)
        self.most = most
        self.loads: list[tuple[float, float]] = []

    def plan(self, counts_E: Tensor) -> BalancedPlan:
        """Every rank learns all counts, and all decide alike."""
        counts_PE: Counts = self.all_counts(counts_E).tolist()
        copies = place_copies(counts_PE, self.most)
        held = len(counts_E) // self.size
        homes = [sum(sum(c[r * held : (r + 1) * held]) for c in counts_PE) for r in range(self.size)]
        self.loads.append((most_by_mean(homes), most_by_mean(copies.load())))
        return self._plan(copies, held, counts_E.device)

    def _plan(self, copies: Copies, held: int, device: torch.device) -> BalancedPlan:
        mine, slots = copies.rows[self.rank], copies.slots
        leaving = [(rank, expert) for rank, experts in enumerate(slots) for expert in experts]
        standing = sorted(leaving, key=lambda block: (block[1], block[0]))
        place = {block: index for index, block in enumerate(standing)}
        sizes = [mine[expert].get(rank, 0) for rank, expert in standing]
        send = [sum(mine[expert].get(rank, 0) for expert in slots[rank]) for rank in range(self.size)]
        arriving = [[theirs[expert].get(self.rank, 0) for expert in slots[self.rank]] for theirs in copies.rows]
        receive = [sum(blocks) for blocks in arriving]
        order_R, inverse_R = move_blocks(
            torch.tensor(sizes, device=device),
            torch.tensor([place[block] for block in leaving], device=device),
            sum(send),
        )
        arriving_PS = torch.tensor(arriving, device=device)
        by_slot_B = torch.arange(arriving_PS.numel(), device=device).view_as(arriving_PS).T.flatten()
        order_N, inverse_N = move_blocks(arriving_PS.flatten(), by_slot_B, sum(receive))
        return BalancedPlan(
            there=Way(order_R, send, receive, order_N),
            back=Way(inverse_N, receive, send, inverse_R),
            counts_e=arriving_PS.sum(0),
            own_rows=sum(sum(blocks[:held]) for blocks in arriving),
            loan=_loan(slots, held, self.rank),
        )

    def run(self, rows_NH: Tensor, plan: Plan, gate_up_eHF: Tensor, down_eIH: Tensor, kernels: Kernels) -> Tensor:
        """Own experts over their rows, then the borrowed ones over theirs."""
        assert isinstance(plan, BalancedPlan)
        if plan.loan is None:
            return super().run(rows_NH, plan, gate_up_eHF, down_eIH, kernels)
        held = len(gate_up_eHF)
        gate_up_eHF, down_eIH, gate_up_nHF, down_nIH = _Lend.apply(gate_up_eHF, down_eIH, self.lend, plan.loan)
        own_NH, foreign_NH = rows_NH.split([plan.own_rows, len(rows_NH) - plan.own_rows])
        outputs_NH = expert_mlp(own_NH, plan.counts_e[:held], gate_up_eHF, down_eIH, kernels=kernels)
        if len(gate_up_nHF) == 0:
            return outputs_NH
        more_NH = expert_mlp(foreign_NH, plan.counts_e[held:], gate_up_nHF, down_nIH, kernels=kernels)
        return torch.cat([outputs_NH, more_NH])

    def lend(self, weights: Tensor, way: Way) -> Tensor:
        """Collective: send weights, or gradients of copies, one way."""
        arrived = weights.new_empty(sum(way.receive), *weights.shape[1:])
        dist.all_to_all_single(arrived, weights, way.receive, way.send, group=self.group)
        self.traffic.bytes += len(weights) * weights.shape[1:].numel() * weights.element_size()
        return arrived


class LoadMeter:
    """What copies of hot experts do for the most loaded rank, over all layers and passes since `reset`."""

    def __init__(self, model: nn.Module) -> None:
        dispatchers = [getattr(module, "dispatcher", None) for module in model.modules()]
        self.dispatchers = [found for found in dispatchers if isinstance(found, BalancedAllToAll)]

    def reset(self) -> None:
        """Begin anew."""
        for dispatcher in self.dispatchers:
            dispatcher.loads.clear()

    def read(self) -> tuple[float | None, float | None]:
        """Collective: the mean load without and with copies, equal on every rank; None without balancing."""
        if not self.dispatchers:
            return None, None
        loads = [load for dispatcher in self.dispatchers for load in dispatcher.loads]
        total = torch.tensor([*map(sum, zip(*loads)), len(loads)], dtype=torch.float64)
        dist.all_reduce(total)
        before, after, passes = total.tolist()
        return before / passes, after / passes


def most_by_mean(load: Sequence[int]) -> float:
    """How many times the mean the most loaded rank has; 1 where there is nothing to do."""
    return max(load) * len(load) / sum(load) if sum(load) else 1.0


def _loan(slots: list[list[int]], held: int, rank: int) -> Loan | None:
    """What `rank` lends and borrows; None if nobody does."""
    borrowed = [experts[held:] for experts in slots]
    if not any(borrowed):
        return None
    lent = [[x - rank * held for x in experts if x // held == rank] for experts in borrowed]
    receive = [sum(x // held == owner for x in borrowed[rank]) for owner in range(len(slots))]
    return Loan([x for experts in lent for x in experts], [len(experts) for experts in lent], receive)


class Context(FunctionCtx):
    """What forward leaves for backward."""

    lend: Move
    loan: Loan


class _Lend(torch.autograd.Function):
    """Own weights as they are, and the borrowed ones; a copy's gradient is added to its owner's in fp32, rounded once.

    One exchange each way for both weights of all copies. Every rank takes part, with nothing where it lends nothing.
    """

    @staticmethod
    def forward(
        ctx: Context, gate_up_eHF: Tensor, down_eIH: Tensor, lend: Move, loan: Loan
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.lend, ctx.loan = lend, loan
        packed = torch.cat([weight[loan.lent].flatten(1) for weight in (gate_up_eHF, down_eIH)], dim=1)
        arrived = lend(packed, Way(None, loan.send, loan.receive, None))
        gate_up, down = arrived.split([weight[0].numel() for weight in (gate_up_eHF, down_eIH)], dim=1)
        return (
            gate_up_eHF.view_as(gate_up_eHF),
            down_eIH.view_as(down_eIH),
            gate_up.reshape(-1, *gate_up_eHF.shape[1:]),
            down.reshape(-1, *down_eIH.shape[1:]),
        )

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        own, copies, loan = grads[:2], grads[2:], ctx.loan
        packed = torch.cat([grad.flatten(1) for grad in copies], dim=1)
        returned = ctx.lend(packed, Way(None, loan.receive, loan.send, None))
        parts = returned.split([grad[0].numel() for grad in own], dim=1)
        totals = [_with_returned(grad, part, loan.lent) for grad, part in zip(own, parts, strict=True)]
        return totals[0], totals[1], None, None


def _with_returned(grad: Tensor, returned: Tensor, lent: Sequence[int]) -> Tensor:
    """Add what came back for each lent expert to its gradient."""
    if not lent:
        return grad
    total = grad.clone()
    for expert in sorted({*lent}):
        wide = grad[expert].to(at_least_fp32(grad.dtype))
        for part, owner in zip(returned, lent, strict=True):
            if owner == expert:
                wide = wide + part.view_as(wide)
        total[expert] = wide
    return total

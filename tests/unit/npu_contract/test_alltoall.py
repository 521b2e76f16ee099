"""The pair of exchange and product, over ranks simulated in one process, against a loop over all experts."""

import pytest
import torch
from contract_tools import equal_in_float64

from spec.npu_ops import OPERATORS
from spec.npu_ops.alltoall import by_rank, communicators, exchange_all
from spec.npu_ops.cases.draws import Draw

RANKS, EXPERTS, WIDTH, COLUMNS = 4, 3, 5, 6


class Ring:
    """What every rank holds, and the calls that it makes."""

    def __init__(self, seed: int) -> None:
        draw = Draw.seeded(seed)
        self.weight = draw.normal(RANKS, EXPERTS, WIDTH, COLUMNS).double()
        self.sent = [draw.split(draw.integer(0, 15), RANKS * EXPERTS) for _ in range(RANKS)]
        self.rows = [draw.normal(sum(counts), WIDTH).double() for counts in self.sent]
        self.received = [
            [self.sent[source][rank * EXPERTS + e] for source in range(RANKS) for e in range(EXPERTS)]
            for rank in range(RANKS)
        ]

    def dispatch(self, rank, monkeypatch, **more):
        arrived = exchange_all(self.rows, [by_rank(counts, RANKS) for counts in self.sent])[rank]
        monkeypatch.setitem(communicators, "ep", lambda rows, sent, received: arrived)
        arguments = (self.rows[rank], self.weight[rank], "ep", RANKS, self.sent[rank], self.received[rank])
        return OPERATORS["npu_alltoallv_gmm"].forward(*arguments, **more)

    def product_of(self, rank):
        """The product of every row that this rank sends, in its own order."""
        experts = self.weight.flatten(0, 1)
        parts = zip(self.rows[rank].split(self.sent[rank]), experts, strict=True)
        return torch.cat([rows @ expert for rows, expert in parts])


@pytest.mark.parametrize("seed", range(5))
def test_every_row_meets_its_expert(seed, monkeypatch):
    ring = Ring(seed)
    for rank in range(RANKS):
        product, shared, rows = ring.dispatch(rank, monkeypatch, permute_out_flag=True)
        counts = torch.tensor(ring.received[rank]).view(RANKS, EXPERTS).sum(0).tolist()
        expected = [part @ expert for part, expert in zip(rows.split(counts), ring.weight[rank], strict=True)]
        assert equal_in_float64(product, torch.cat(expected))
        assert shared is None


@pytest.mark.parametrize("seed", range(5))
def test_there_and_back(seed, monkeypatch):
    """Dispatch through the first product, then home through a product with the identity."""
    ring, identity = Ring(seed), torch.eye(COLUMNS).double().expand(EXPERTS, -1, -1)
    outgoing = []

    def keep(rows, sent, received):
        outgoing.append(rows)
        return rows.new_zeros(sum(received), rows.size(1))

    for rank in range(RANKS):
        product = ring.dispatch(rank, monkeypatch)[0]
        monkeypatch.setitem(communicators, "ep", keep)
        home = (product, identity, "ep", RANKS, ring.received[rank], ring.sent[rank])
        OPERATORS["npu_gmm_alltoallv"].forward(*home)
    back = exchange_all(outgoing, [by_rank(counts, RANKS) for counts in ring.received])
    for rank in range(RANKS):
        assert equal_in_float64(back[rank], ring.product_of(rank))


def test_rows_arrive_by_expert_and_there_by_rank(monkeypatch):
    counts, rows = [[1, 1, 1, 1], [1, 1, 1, 1]], [torch.arange(4.0)[:, None], torch.arange(10.0, 14)[:, None]]
    arrived = exchange_all(rows, [by_rank(one, 2) for one in counts])
    monkeypatch.setitem(communicators, "ep", lambda rows, sent, received: arrived[1])
    weight = torch.ones(2, 1, 1)
    _, _, sorted_rows = OPERATORS["npu_alltoallv_gmm"].forward(
        rows[1], weight, "ep", 2, counts[1], counts[0], permute_out_flag=True
    )
    assert sorted_rows.flatten().tolist() == [2, 12, 3, 13]


@pytest.mark.parametrize("name", ["npu_alltoallv_gmm", "npu_gmm_alltoallv"])
def test_transposed_weights_and_the_shared_product(name, monkeypatch):
    monkeypatch.setitem(communicators, "ep", lambda rows, sent, received: rows)
    draw, counts = Draw.seeded(0), [2, 0, 1, 3]
    x, weight, y, other = (draw.normal(*shape).double() for shape in ((6, 5), (2, 4, 5), (7, 3), (2, 3)))
    plain = OPERATORS[name].forward(x, weight.mT, "ep", 2, counts, counts, mm_x=y, mm_weight=other.mT)
    options = {"trans_gmm_weight": True, "trans_mm_weight": True, "mm_x": y, "mm_weight": other}
    turned = OPERATORS[name].forward(x, weight, "ep", 2, counts, counts, **options)
    assert plain[0].equal(turned[0])
    assert plain[1].equal(turned[1])
    assert equal_in_float64(turned[1], torch.einsum("bk,nk->bn", y, other))

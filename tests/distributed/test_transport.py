"""What every exchange relies on: sums are sums, means are means, and rows may be of any number, also of none."""

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.world_size(2)


@pytest.mark.parametrize(("op", "result"), [("SUM", 3.0), ("AVG", 1.5), ("MAX", 2.0)])
def test_a_reduction_is_what_it_is_called(op, result, process):
    values = torch.full((3,), float(process.rank + 1), device=process.device)
    dist.all_reduce(values, op=getattr(dist.ReduceOp, op))
    assert values.tolist() == [result] * 3


@pytest.mark.parametrize("rows", [[[2, 1], [0, 3]], [[0, 2], [0, 1]], [[0, 0], [0, 0]]], ids=str)
def test_rows_of_any_number_arrive_in_the_order_of_their_senders(rows, process):
    """`rows[a][b]` rows go from rank a to rank b; each says who sent it."""
    send, receive = rows[process.rank], [row[process.rank] for row in rows]
    sent = torch.full((sum(send), 2), float(process.rank), device=process.device)
    arrived = sent.new_empty(sum(receive), 2)
    dist.all_to_all_single(arrived, sent, receive, send)
    assert arrived[:, 0].tolist() == [0.0] * receive[0] + [1.0] * receive[1]

"""Each exchange of rows, on its own: outputs and gradients are those of the law on all ranks' tokens."""

import pytest
import torch
from dispatch_cases import CASES, DISPATCHERS, EXPERTS, HIDDEN, INNER, draw_layer, gather_whole, run_part
from torch.distributed.device_mesh import init_device_mesh

from glmv.ops.kernels import Kernels
from glmv.parallel.balance import place_copies

pytestmark = pytest.mark.timeout(60)  # a rank that others wait for is to be seen soon
every_dispatcher = pytest.mark.parametrize("kind", DISPATCHERS)


@pytest.fixture(scope="module")
def mesh(process):
    return init_device_mesh(process.device.type, (process.world_size,), mesh_dim_names=("ep",))


def run(case, kind, mesh, dtype=torch.float64):
    layer, dispatcher = draw_layer(case, mesh.size()), DISPATCHERS[kind](mesh)
    return layer, dispatcher, run_part(layer, dispatcher, mesh, dtype, grouped=dtype != torch.float64)


def check(case, kind, mesh, judge, dtype=torch.float64):
    layer, _, part = run(case, kind, mesh, dtype)
    said = gather_whole(part)
    if mesh.get_rank() == 0:
        judge(said, layer.law, dtype)


@pytest.mark.world_size(4)
@every_dispatcher
@pytest.mark.parametrize("case", CASES)
def test_four_ranks_compute_the_law(case, kind, mesh, judge):
    check(case, kind, mesh, judge)


@pytest.mark.world_size(2)
@every_dispatcher
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", ["uneven", "all_to_first_rank"])
def test_two_ranks_round_no_more_than_one(case, dtype, kind, mesh, judge):
    check(case, kind, mesh, judge, dtype)


def counts_of(layer):
    """Rows [P, E] of each rank for each expert."""
    tokens = layer.top_k_index_TK.split(layer.tokens)
    return torch.stack([torch.bincount(index_TK.flatten(), minlength=EXPERTS) for index_TK in tokens])


ROW = HIDDEN * 8  # bytes in float64


@pytest.mark.world_size(4)
@pytest.mark.parametrize("case", ["uneven", "all_to_first_rank", "rank_1_has_nothing"])
def test_alltoall_sends_what_its_docstring_says(case, mesh, process):
    layer, dispatcher, _ = run(case, "alltoall", mesh)
    to_PP = counts_of(layer).view(4, 4, -1).sum(2)
    kept = to_PP[process.rank, process.rank]
    rows = 2 * int(to_PP[process.rank].sum() - kept + to_PP[:, process.rank].sum() - kept)
    assert dispatcher.traffic.rows == rows
    assert dispatcher.traffic.bytes == rows * ROW + 3 * (EXPERTS // 4) * 8


@pytest.mark.world_size(4)
@pytest.mark.parametrize("case", ["uneven", "all_to_first_rank", "rank_1_has_nothing"])
def test_allgather_sends_what_its_docstring_says(case, mesh):
    layer, dispatcher, _ = run(case, "allgather", mesh)
    to_PP = counts_of(layer).view(4, 4, -1).sum(2)
    rows = 2 * 3 * int(to_PP.sum(1).max() + to_PP.sum(0).max())
    assert dispatcher.traffic.rows == rows
    assert dispatcher.traffic.bytes == rows * ROW + 3 * EXPERTS * 8


@pytest.mark.world_size(4)
def test_balancing_sends_what_its_docstring_says(mesh, process):
    """All rows are for rank 0's two experts: it lends them, and the gradients of the copies come back."""
    layer, dispatcher, _ = run("all_to_first_rank", "balance", mesh)
    slots = place_copies(counts_of(layer).tolist(), most=2).slots
    travelling = sum(map(len, slots)) - EXPERTS if process.rank == 0 else len(slots[process.rank]) - EXPERTS // 4
    assert travelling > 0
    weights = (HIDDEN * 2 * INNER + INNER * HIDDEN) * 8
    assert dispatcher.traffic.bytes == dispatcher.traffic.rows * ROW + 3 * EXPERTS * 8 + travelling * weights


@pytest.mark.world_size(4)
@every_dispatcher
def test_without_any_token_all_gradients_are_zeros(kind, mesh, monkeypatch):
    monkeypatch.setitem(CASES, "nothing", ([0] * 4, range(8)))
    _, dispatcher, part = run("nothing", kind, mesh)
    assert not any(grad.any() for grad in part.said().values())
    assert part.gate_up_EHF.grad.to_local().shape == (EXPERTS // 4, HIDDEN, 2 * INNER)
    assert dispatcher.traffic.rows == 0


@pytest.mark.world_size(2)
@every_dispatcher
def test_a_pass_without_gradients_leaves_nothing_behind(kind, mesh, judge):
    """An evaluation between two steps, with other tokens."""
    layer, dispatcher = draw_layer("even", 2), DISPATCHERS[kind](mesh)
    other = draw_layer("uneven", 2, seed=4)
    with torch.no_grad():
        weights = [weight.chunk(2)[mesh.get_local_rank()] for weight in (other.gate_up_EHF, other.down_EIH)]
        counts_E = torch.tensor([1, 0, 2, 0, 0, 0, 3, 0])
        dispatcher(other.hidden_TH[:6], counts_E, *weights, kernels=Kernels(grouped=False))
    said = gather_whole(run_part(layer, dispatcher, mesh, torch.float64, grouped=False))
    if mesh.get_rank() == 0:
        judge(said, layer.law, torch.float64)

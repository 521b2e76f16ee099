"""The exchange inside of the NPU's matmuls, against the law on all ranks' tokens."""

import pytest
import torch
from dispatch_cases import EXPERTS, HIDDEN, draw_layer, gather_whole, run_part
from torch.distributed.device_mesh import init_device_mesh

from glmv.parallel.mc2 import Mc2, why_not, why_unsupported

BF16 = torch.bfloat16
A2, A3, NEXT = "Ascend910B3", "Ascend910_9382", "Ascend950PR_9579"


@pytest.fixture(scope="module")
def mesh(process):
    mesh = init_device_mesh(process.device.type, (process.world_size,), mesh_dim_names=("ep",))
    if why := why_not(mesh, "bf16", EXPERTS):
        pytest.skip(f"mc2: {why}")
    return mesh


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", ["uneven", "all_to_first_rank", "all_to_last_rank", "rank_1_has_nothing"])
def test_two_ranks_compute_the_law(case, mesh, judge):
    layer = draw_layer(case, 2)
    said = gather_whole(run_part(layer, Mc2(mesh), mesh, BF16, grouped=True))
    if mesh.get_rank() == 0:
        judge(said, layer.law, BF16)


@pytest.mark.world_size(2)
def test_it_sends_the_rows_of_alltoall(mesh, process):
    layer, dispatcher = draw_layer("uneven", 2), Mc2(mesh)
    run_part(layer, dispatcher, mesh, BF16, grouped=True)
    tokens = layer.top_k_index_TK.split(layer.tokens)
    to_PP = torch.stack([torch.bincount(index.flatten(), minlength=EXPERTS).view(2, -1).sum(1) for index in tokens])
    rows = 2 * int(to_PP[process.rank, 1 - process.rank] + to_PP[1 - process.rank, process.rank])
    assert dispatcher.traffic.rows == rows
    assert dispatcher.traffic.bytes == rows * HIDDEN * BF16.itemsize + EXPERTS // 2 * 8


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", ["uneven", "rank_1_has_nothing"])
def test_its_operators_are_called_once_each_way(case, mesh, count):
    with count() as counted:
        run_part(draw_layer(case, 2), Mc2(mesh), mesh, BF16, grouped=True)
    assert counted.calls["npu_alltoallv_gmm"] == counted.calls["npu_gmm_alltoallv"] == 2


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (("npu", A3, "bf16", 8, 128), None),
        (("npu", NEXT, "bf16", 2, 12), None),
        (("cpu", "", "bf16", 2, 12), "the ranks are on cpu"),
        (("npu", A3, "fp32", 8, 128), "param_dtype = fp32"),
        (("npu", A3, None, 8, 128), "param_dtype = null"),
        (("npu", A2, "bf16", 8, 128), "Ascend910B3 does not have it"),
        (("npu", A3, "bf16", 2, 12), "expert_parallel_size = 2 is none of 8, 16, 32, 64, 128 on Ascend910_9382"),
        (("npu", NEXT, "bf16", 128, 256), "expert_parallel_size = 128 is none of 2, 4, 8, 16, 32, 64"),
        (("npu", "some chip", "bf16", 3, 12), "expert_parallel_size = 3 is none of 2, 4"),
        (("npu", A3, "bf16", 8, 320), "320 experts on 8 ranks"),
    ],
    ids=str,
)
def test_what_the_operators_do_not_take_is_refused(asked, why):
    assert (why is None and why_unsupported(*asked) is None) or why in why_unsupported(*asked)

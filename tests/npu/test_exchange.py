"""The exchanges of expert parallelism on NPUs, with their fused permutations and matmuls."""

import pytest
import torch
from dispatch_cases import DISPATCHERS, draw_layer, gather_whole, run_part
from torch.distributed.device_mesh import init_device_mesh

from glmv.parallel.mc2 import Mc2

EVERY = DISPATCHERS | {"mc2": Mc2}


@pytest.fixture(scope="module")
def mesh(process):
    return init_device_mesh(process.device.type, (process.world_size,), mesh_dim_names=("ep",))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", DISPATCHERS)
@pytest.mark.parametrize("case", ["uneven", "all_to_first_rank", "rank_1_has_nothing"])
def test_two_ranks_compute_the_law(case, kind, mesh, judge):
    layer = draw_layer(case, 2)
    said = gather_whole(run_part(layer, DISPATCHERS[kind](mesh), mesh, torch.bfloat16, grouped=True))
    if mesh.get_rank() == 0:
        judge(said, layer.law, torch.bfloat16)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", EVERY)
def test_the_host_waits_once_for_a_layer(kind, mesh, count):
    layer, dispatcher = draw_layer("uneven", 2), EVERY[kind](mesh)
    with count() as counted:
        part = run_part(layer, dispatcher, mesh, torch.bfloat16, grouped=True)
    assert part.output_TH.shape[0] > 0
    assert counted.syncs == 1

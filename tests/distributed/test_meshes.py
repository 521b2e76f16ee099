import threading
from pathlib import Path

import pytest

from glmv.config.parallel import ParallelConfig
from glmv.parallel.mesh import build_meshes

pytestmark = pytest.mark.world_size(2)
SPREAD = ParallelConfig(expert_parallel_size=2)


def threads():
    return len(list(Path(f"/proc/{threading.get_native_id()}/task").iterdir()))


def test_a_mesh_that_is_asked_for_again_is_the_same_one(process):
    first, plain = build_meshes(SPREAD, process), build_meshes(ParallelConfig(), process)
    assert build_meshes(SPREAD, process).experts is first.experts
    assert plain.data is first.data
    assert plain.experts is not first.experts


def test_no_threads_are_added_by_asking_again(process):
    build_meshes(SPREAD, process)
    before = threads()
    for _ in range(3):
        build_meshes(SPREAD, process)
    assert threads() <= before

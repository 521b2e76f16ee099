"""Counters say exactly what a program did."""

import pytest

WAITS = {
    "item": {"item": 1},
    "branch": {"item": 1},
    "cpu": {"copy to the host": 1},
    "tolist": {"copy to the host": 1},
    "read a mask": {"aten::nonzero": 1},
    "write a mask": {"aten::_index_put_impl_": 1},
    "bincount": {"aten::bincount": 2},
    "repeats": {"aten::repeat_interleave": 1},
    "synchronize": {"synchronize": 1},
    "pageable": {"copy to the host": 1},
}


@pytest.mark.parametrize("action", WAITS)
def test_waits_of_the_host(device_facts, action):
    assert device_facts["waits"][action] == WAITS[action]


def test_what_does_not_wait(device_facts):
    assert device_facts["no_waits"] == [{}] * 7


def test_calls_of_a_small_function(device_facts):
    assert device_facts["a_small_function"]["calls"] == {"npu_swiglu": 1, "npu_swiglu.backward": 1, "aten::sum": 2}


def test_waits_of_a_small_function(device_facts):
    assert device_facts["a_small_function"]["syncs"] == 1


def test_recorded_calls_have_shapes_and_dtypes(device_facts):
    assert device_facts["a_small_function"]["recorded"] == ["npu_swiglu", [2, 4], "torch.float32", 1]


def test_bytes_of_collectives(rank_facts):
    assert rank_facts[0]["counted_bytes"] == [{"allreduce": [2, 24]}, 0]

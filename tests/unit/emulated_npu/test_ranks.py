"""Collectives of the hccl backend, and FSDP2 on two ranks."""

import pytest

REDUCED = {"SUM": 3.0, "MAX": 2.0, "MIN": 1.0, "PRODUCT": 2.0, "AVG": 1.5}
DTYPES = {"bfloat16": 3, "float16": 3, "int64": 3, "int32": 3, "int8": 3, "bool": True}


@pytest.mark.parametrize("op", REDUCED)
def test_all_reduce(rank_facts, op):
    assert [facts["all_reduce"][op] for facts in rank_facts] == [[REDUCED[op]] * 2] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_that_are_summed(rank_facts, dtype):
    assert rank_facts[0]["dtypes"][f"torch.{dtype}"] == [DTYPES[dtype]] * 2


def test_an_average_is_a_sum_first(rank_facts):
    assert rank_facts[0]["average_of_large_numbers"] == "inf"


def test_a_premultiplied_sum_scales_its_input(rank_facts):
    assert rank_facts[1]["premultiplied_sum"] == [[1.5, 1.5], [1.0] * 4]


def test_no_float64_sums(rank_facts):
    assert rank_facts[0]["float64"].startswith("RuntimeError: HCCL reduces no Double tensors")


def test_no_bitwise_reductions(rank_facts):
    assert rank_facts[0]["bitwise"] == "RuntimeError: HCCL has no bitwise reductions"


def test_gather_and_scatter(rank_facts):
    gathered, lists = [1.0, 1.0, 2.0, 2.0], [[1.0, 1.0], [2.0, 2.0]]
    assert rank_facts[0]["gather_and_scatter"] == [gathered, [0.0, 2.0], lists, [3.0, 3.0]]
    assert rank_facts[1]["gather_and_scatter"] == [gathered, [4.0, 6.0], lists, [30.0, 30.0]]


def test_uneven_exchange(rank_facts):
    assert [facts["uneven_exchange"] for facts in rank_facts] == [[0.0, 10.0, 11.0, 12.0], [1.0, 2.0]]


def test_exchange_of_nothing(rank_facts):
    assert [facts["empty_exchange"] for facts in rank_facts] == [[0, 3]] * 2


def test_exchange_of_lists(rank_facts):
    assert [facts["exchange_of_lists"] for facts in rank_facts] == [[0.0, 10.0], [1.0, 11.0]]


def test_broadcast_and_both_send_first(rank_facts):
    assert [facts["one_to_all_and_back"] for facts in rank_facts] == [[[2.0] * 2, [2.0] * 2], [[2.0] * 2, [1.0] * 2]]


def test_host_tensors_go_over_gloo_where_both_are_named(rank_facts):
    assert rank_facts[0]["host_tensor"] == [2.0, 2.0]


def test_sharded_training_gives_the_bits_of_the_cpu(rank_facts):
    assert [facts["sharded_training_like_cpu"] for facts in rank_facts] == [True, True]


def test_training_resumes_from_a_checkpoint(rank_facts):
    assert [facts["checkpoint_resumes"] for facts in rank_facts] == [True, True]


def test_a_sharded_step_never_waits(rank_facts):
    assert rank_facts[0]["sharded_step_waits"] == {}

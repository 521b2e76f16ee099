"""The emulated device behaves as a device: memory, refusals, random numbers, training helpers."""

import pytest

LARGE_ODD = 0x7FFFFFFFFFFFFFF1


def test_announced(device_facts):
    line, name, is_emulated = device_facts["announcement"]
    assert line.startswith("EMULATED npu: contract operators on host memory, 2 device(s)")
    assert "EMULATED" in name
    assert is_emulated


def test_computes(device_facts):
    assert device_facts["addition"] == [[2.0, 2.0], "npu:0"]


def test_several_devices(device_facts):
    assert device_facts["second_device"] == ["npu:1", 2]


def test_no_more_devices_than_asked_for(device_facts):
    assert "npu:2 does not exist" in device_facts["third_device"]


def test_fresh_memory_is_poisoned(device_facts):
    assert device_facts["fresh_memory"] == {
        "floats are nan": True,
        "int64": [LARGE_ODD, LARGE_ODD],
        "resized storage": True,
    }


@pytest.mark.parametrize("name", ["mixed_with_cpu", "mixed_with_other_npu", "mixed_operator"])
def test_mixed_devices_are_refused(device_facts, name):
    assert device_facts[name].startswith("RuntimeError: Expected all tensors to be on the same device")


def test_outputs_are_resized(device_facts):
    assert device_facts["resized_output"] == [[1.0, 2.0, 3.0], True, [1, 0, 2]]


def test_views_share_memory(device_facts):
    assert device_facts["views_share_memory"] == [[0.0, 2.0, 0.0], [0.0, 2.0, 0.0]]


def test_indices_may_come_from_the_host(device_facts):
    assert device_facts["host_indices"] == [0.0, 2.0]


def test_copies_between_devices(device_facts):
    assert device_facts["between_devices"] == [[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], "npu:1", "0"]


def test_a_single_number_may_stay_on_the_host(device_facts):
    assert device_facts["mixed_with_number"] == [3.0, 3.0]


def test_operators_do_not_run_on_the_cpu(device_facts):
    assert device_facts["operator_on_cpu"].startswith("NotImplementedError: Could not run 'npu::npu_swiglu'")


def test_numpy_needs_a_copy(device_facts):
    assert device_facts["numpy"].startswith("TypeError: can't convert npu:0 device type tensor")


def test_no_float64_products(device_facts):
    assert "aten::mm has no float64 kernel on an NPU" in device_facts["float64_matmul"]


def test_other_settings_need_another_process(device_facts):
    assert device_facts["other_settings"].startswith("EmulationError")
    assert "start another process" in device_facts["other_settings"]


def test_stand_in_has_the_contract_and_nothing_else(device_facts):
    has_exactly_the_contract, version, is_same_module = device_facts["stand_in"]
    assert has_exactly_the_contract
    assert version.endswith("+emulated")
    assert is_same_module


def test_cpu_generators_are_refused(device_facts):
    assert device_facts["cpu_generator"] == "RuntimeError: Expected a 'npu' device type for generator but found 'cpu'"


@pytest.mark.parametrize("name", ["seeded", "host undisturbed", "moves on"])
def test_random_numbers_of_the_device_are_its_own(device_facts, name):
    assert device_facts["random_numbers"][name] is True


def test_recomputation_draws_the_same_numbers(device_facts):
    assert device_facts["recomputation"] is True


def test_histograms_of_integers(device_facts):
    assert device_facts["integer_histogram"] == [[1, 0, 2], "torch.int64"]


def test_autocast(device_facts):
    assert device_facts["autocast"] == ["torch.bfloat16", "torch.float32", "torch.float32", "torch.bfloat16"]


@pytest.mark.parametrize("name", ["attention_like_cpu", "convolution_like_cpu", "optimizers_like_cpu"])
def test_same_bits_as_the_cpu(device_facts, name):
    assert set(device_facts[name]) == {True}


def test_tensors_come_back_on_their_device(device_facts):
    assert device_facts["saved_and_loaded"] == "npu:1"


def test_memory_in_use(device_facts):
    assert device_facts["memory"] == [4000, 0, 4000]


def test_streams_are_current_inside_their_block(device_facts):
    assert device_facts["streams"] == [True, False]


def test_hccl_alone_takes_no_host_tensors(device_facts):
    assert device_facts["host_tensor_over_hccl"] == "RuntimeError: No backend type associated with device type cpu"

"""What a test on an NPU sees."""

import sys

import pytest
import torch
import torch.distributed as dist


@pytest.mark.npu
def test_of_one_npu(device):
    assert device == torch.device("npu", 0)
    assert torch.ones(3, device=device).sum().item() == 3


@pytest.mark.npu
@pytest.mark.world_size(2)
def test_of_two_npus(process, device):
    ones = torch.ones(3, device=device)
    dist.all_reduce(ones)
    assert ones.tolist() == [2, 2, 2]


def test_of_none():
    assert not hasattr(torch, "npu")
    assert "torch_npu" not in sys.modules

"""What the machine calls by name, and what the emulated npu has, is there in the real torch_npu."""

import pytest
import torch

from glmv.parallel.npu import set_up
from glmv.verify.emulated_npu import device
from spec.npu_ops import OPERATORS

pytestmark = pytest.mark.conformance


def test_the_emulated_npu_has_no_name_that_the_real_one_lacks():
    names = [name for name in vars(device.make_module()) if not name.startswith("__")]
    assert [name for name in names if not hasattr(torch.npu, name)] == []


def test_every_operator_is_an_attribute_of_the_package(session):
    import torch_npu

    assert [name for name in OPERATORS if not hasattr(torch_npu, name)] == []


def test_a_communicator_can_be_asked_for_its_name(session):
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    assert callable(ProcessGroupHCCL.get_hccl_comm_name)


def test_the_device_is_set_up(session):
    """No private memory formats, no compiler for every new shape."""
    import torch_npu

    torch.npu.config.allow_internal_format = True
    torch.npu.set_compile_mode(jit_compile=True)
    set_up()
    option = torch_npu._C._npu_getOption
    assert [option("ALLOW_INTERNAL_FORMAT"), option("jitCompile")] == [b"disable", b"disable"]

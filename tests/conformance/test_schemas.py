"""The schemas that were read out of the wheel's strings are those that the imported wheel registers."""

import pytest
import torch

from spec.npu_ops.schemas import PINNED, versions

pytestmark = pytest.mark.conformance


def registered(name):
    operator, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.npu, operator), overload or "default")._schema


@pytest.mark.parametrize("name", versions()[PINNED])
def test_a_schema_is_the_registered_one(name, report):
    assert str(torch._C.parse_schema(f"npu::{versions()[PINNED][name]}")) == str(registered(name))
    report.schemas += 1


def test_the_wheel_is_the_pinned_one(report):
    assert report.torch_npu == PINNED


def test_no_overload_is_missing():
    operators = {name.partition(".")[0] for name in versions()[PINNED]}
    found = {
        f"{operator}.{overload}".removesuffix(".default")
        for operator in operators
        for overload in getattr(torch.ops.npu, operator).overloads()
    }
    assert found == set(versions()[PINNED])

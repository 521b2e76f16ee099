"""The NPU tier: every test here runs on a real NPU, or where there is none on the emulated device."""

import logging

import pytest
from model_cases import Tiny

from glmv.ops import registry
from glmv.tiny.make import make_tiny


def pytest_itemcollected(item):
    item.add_marker("npu")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    """The tiny model's Hugging Face directory, read-only."""
    return make_tiny(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_dir) -> Tiny:
    return Tiny(tiny_dir)


@pytest.fixture
def count():
    """`with count() as counted`: what the device was made to do. Hardware keeps no such counters."""
    from glmv.verify import emulated_npu

    if not emulated_npu.is_emulated():
        pytest.skip("counts calls and waits, which only the emulated device does")
    return emulated_npu.count


@pytest.fixture
def said(caplog):
    """Messages that operators log once in a process, as if they had not yet."""
    registry.say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="glmv.ops"):
        yield lambda: [record.message for record in caplog.records]

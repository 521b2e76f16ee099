"""These tests run with the real torch_npu, in the process that `make conformance` starts; elsewhere they skip."""

import os
from pathlib import Path

import pytest

from glmv.verify.wheel.load import load
from glmv.verify.wheel.session import Report, Session

SESSION = Session.of(os.environ)
if SESSION:
    load(SESSION.site)


def pytest_collection_modifyitems(items):
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    if SESSION is None:
        for item in here:
            item.add_marker(pytest.mark.skip(reason="needs the real torch_npu wheel: make conformance"))


@pytest.fixture(scope="session")
def session() -> Session:
    return SESSION


@pytest.fixture(scope="session")
def report(session):
    """Numbers of what was compared; written when the last test has ended."""
    import torch_npu

    report = Report(torch_npu.__version__)
    yield report
    report.write(session.report)


@pytest.fixture
def agree(report):
    """Records the differences between contract and wheel, and fails if there are any."""

    def check(differences):
        __tracebackhide__ = True
        found = [difference for difference in differences if difference is not None]
        report.mismatches.extend(found)
        if found:
            pytest.fail(f"{len(found)} differences\n" + "\n".join(found[:5]))

    return check

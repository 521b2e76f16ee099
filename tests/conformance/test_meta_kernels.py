"""Every output of the contract has the shape and dtype that the wheel's own meta kernel infers."""

import functools
from dataclasses import replace

import pytest

from glmv.verify.wheel.parity import WITHOUT_META_KERNEL, differences, drawn, has_meta_kernel
from spec.npu_ops import OPERATORS
from spec.npu_ops.cases import edges

pytestmark = pytest.mark.conformance

DRAWN = 140  # of each operator; 2,000 in all is what is asked for
COMPARED = [name for name in OPERATORS if name not in WITHOUT_META_KERNEL]


@pytest.mark.parametrize("name", COMPARED)
def test_outputs_are_those_that_the_wheel_infers(name, agree, report):
    cases = [*drawn(name, DRAWN), *edges(name)]
    report.meta_cases[name] = len(cases)
    agree(differences(name, case) for case in cases)


def test_operators_without_a_meta_kernel_are_known(report):
    report.without_meta_kernel = WITHOUT_META_KERNEL
    assert {name for name in OPERATORS if not has_meta_kernel(name)} == set(WITHOUT_META_KERNEL)


WRONG = {
    "dtype": lambda y, rstd: (y, rstd.bfloat16()),
    "shape": lambda y, rstd: (y, rstd[..., 0]),
    "number of outputs": lambda y, rstd: y,
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_contract_is_seen(monkeypatch, what):
    contract = OPERATORS["npu_rms_norm"]

    @functools.wraps(contract.forward)
    def forward(*args, **kwargs):
        return WRONG[what](*contract.forward(*args, **kwargs))

    monkeypatch.setitem(OPERATORS, "npu_rms_norm", replace(contract, forward=forward))
    assert differences("npu_rms_norm", drawn("npu_rms_norm", 1)[0]) is not None

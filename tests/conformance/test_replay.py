"""A training step's operator calls, recorded on the emulated npu, are ones that the real torch_npu takes."""

import pytest

from glmv.verify.wheel.recording import RecordedCall, read_recording
from glmv.verify.wheel.replay import replay

pytestmark = pytest.mark.conformance


def test_every_call_of_a_training_step_is_accepted(session, agree, report):
    if session.recording is None:
        pytest.skip("no C++ compiler to build the emulated npu with")
    result = replay(read_recording(session.recording))
    report.replayed_calls = dict(result.accepted)
    agree(result.refused)
    assert result.accepted.keys() >= {"npu_fusion_attention", "npu_grouped_matmul", "npu_moe_token_permute"}


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        ("npu_swiglu", (3,), {}),  # no tensor
        ("npu_swiglu", (), {"x": 1}),  # no such argument
        ("npu_no_such_operator", (), {}),
    ],
)
def test_a_call_that_the_schema_does_not_allow_is_refused(op, args, kwargs):
    result = replay([RecordedCall(op, args, kwargs)])
    assert (len(result.refused), sum(result.accepted.values())) == (1, 0)

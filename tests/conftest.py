"""Fixtures of every tier."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from glmv.verify.judge import judge as judge_by_law
from spec.numerics import Policy


@pytest.fixture(scope="session")
def judge() -> Callable[[Mapping[str, Tensor], Callable[[Policy], Mapping[str, Tensor]], torch.dtype], None]:
    """`judge(candidate, law, dtype)`: every tensor of the candidate within budget of the law."""

    def check(candidate, law, dtype):
        __tracebackhide__ = True
        findings = judge_by_law({name: t.detach().cpu() for name, t in candidate.items()}, law, dtype)
        missed = [str(finding) for finding in findings if finding.used > 1]
        if missed:
            pytest.fail("\n".join(missed[:10]))

    return check

"""Shapes and routings that nobody thought of."""
# Shapes: T tokens, K experts per token, E experts.

import pytest
import torch
from expert_cases import drawn_case, poison
from hypothesis import given, settings
from hypothesis import strategies as st

from glmv.ops.kernels import Kernels

FP32, FLOAT64, BF16 = torch.float32, torch.float64, torch.bfloat16


@st.composite
def cases(draw, multiple=8):
    """Sizes that the grouped kernel takes in bf16; some experts are chosen by nobody, some by all."""
    experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, min(experts, 4)))
    busy = draw(st.integers(top_k, experts))  # experts that get any token
    first = draw(st.integers(0, experts - busy))
    tokens = draw(st.integers(1, 12))
    chosen = st.lists(st.integers(first, first + busy - 1), min_size=top_k, max_size=top_k, unique=True)
    routing = draw(st.lists(chosen, min_size=tokens, max_size=tokens))
    hidden, inner = (multiple * draw(st.integers(1, 4)) for _ in range(2))
    return drawn_case(routing, experts, hidden, inner, seed=draw(st.integers(0, 99)))


@pytest.mark.parametrize(
    ("dtype", "grouped"),
    [(FLOAT64, False), (FP32, True), (BF16, True)],
    ids=["float64-looped", "fp32-grouped", "bf16-grouped"],
)
@settings(max_examples=15)
@given(case=cases())
def test_any_routing_of_any_size(case, dtype, grouped, device, judge):
    poison(device, case.gate_up_EHF.shape, case.down_EIH.shape, case.hidden_TH.shape)
    judge(case.machine(dtype, device, Kernels(grouped=grouped)), case.law, dtype)

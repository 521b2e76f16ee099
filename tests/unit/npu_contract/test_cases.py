"""Every drawn and every border case is accepted, and everything that must be refused is."""

import pytest
import torch
from contract_tools import call, drawn, tensors, truth

from spec.npu_ops import OPERATORS, Refused
from spec.npu_ops.alltoall import communicators
from spec.npu_ops.cases import SOURCES, edges, refusals
from spec.npu_ops.schemas import schema

REFUSALS = [(name, *refusal) for name in OPERATORS for refusal in refusals(name)]
EDGES = [pytest.param(name, case, id=f"{name}: {case.label}") for name in OPERATORS for case in edges(name)]


@pytest.fixture(autouse=True)
def group(monkeypatch):
    """A communicator that receives ones."""
    monkeypatch.setitem(communicators, "group", lambda rows, sent, received: rows.new_ones(sum(received), rows.size(1)))


def test_every_operator_has_cases():
    assert SOURCES.keys() == OPERATORS.keys()


@pytest.mark.parametrize("name", OPERATORS)
def test_names_are_keys(name):
    assert OPERATORS[name].name == name


@pytest.mark.parametrize("name", OPERATORS)
def test_the_signature_is_that_of_the_wheel(name):
    arguments = torch._C.parse_schema(schema(name)).arguments
    found = OPERATORS[name].signature.parameters.values()
    assert [(p.name, p.kind is p.KEYWORD_ONLY) for p in found] == [(a.name, a.kwarg_only) for a in arguments]
    defaults = [None if p.default is p.empty else p.default for p in found]
    assert defaults == [a.default_value for a in arguments]


@pytest.mark.parametrize("name", OPERATORS)
def test_drawn_cases_are_accepted(name):
    for seed in range(60):
        case = drawn(name, seed)
        OPERATORS[name](*case.args, **case.kwargs)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_seed_draws_one_case(name):
    first, second = (repr((case.args, case.kwargs)) for case in (drawn(name, 3), drawn(name, 3)))
    assert first == second


@pytest.mark.parametrize("name", OPERATORS)
def test_draws_vary(name):
    contract = OPERATORS[name]
    seen = set()
    for seed in range(100):
        case = drawn(name, seed)
        inputs = contract.inputs(case.args, case.kwargs).values()
        seen.add(tuple((tuple(x.shape), x.dtype, x.is_contiguous()) for x in inputs))
    assert len(seen) > 80


@pytest.mark.parametrize(("name", "case"), EDGES)
def test_edges_are_accepted(name, case):
    assert tensors(OPERATORS[name](*case.args, **case.kwargs))


@pytest.mark.parametrize(
    ("name", "label", "args", "kwargs", "message"), REFUSALS, ids=[f"{name}: {label}" for name, label, *_ in REFUSALS]
)
def test_refused(name, label, args, kwargs, message):
    with pytest.raises(Refused) as caught:
        OPERATORS[name].check(*args, **kwargs)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", OPERATORS)
def test_float64_is_refused_but_computed(name):
    case = truth(drawn(name, 0))
    with pytest.raises(Refused, match=r"DT_DOUBLE|float64"):
        OPERATORS[name](*case.args, **case.kwargs)
    assert tensors(call(name, case))[0].dtype == torch.float64

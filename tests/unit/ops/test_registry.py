import pytest

from glmv.ops.registry import Operator


def double(x):
    return 2 * x


def halve(x):
    return x // 2


@pytest.fixture
def operator():
    operator = Operator("operator")
    operator.register("double", when=lambda x: True)(double)
    operator.register("halve", when=lambda x: x > 9)(halve)
    return operator


def test_the_newest_that_accepts_is_used(operator):
    assert (operator(10), operator.choose(10)) == (5, "halve")
    assert (operator(3), operator.choose(3)) == (6, "double")


def test_a_name_given_again_replaces_the_old_one(operator):
    operator.register("halve", when=lambda x: x > 9)(lambda x: -x)
    assert operator(10) == -10
    assert list(operator.implementations) == ["double", "halve"]


def test_nobody_accepts():
    operator = Operator("operator")
    operator.register("double", when=lambda x: x > 0)(double)
    with pytest.raises(LookupError, match="operator: none of double accepts"):
        operator(-1)

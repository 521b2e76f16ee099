"""No number typed by hand decides whether a result is close enough: budgets are derived, or equality is exact."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TOLERANCES = {"atol", "rtol", "abs", "rel", "abs_tol", "rel_tol"}
# Without arguments these bring a tolerance of their own.
COMPARISONS = {"allclose", "isclose", "approx", "assert_close", "assert_allclose", "assertAlmostEqual"}


def is_typed(value: ast.expr) -> bool:
    """A non-zero number, or arithmetic on nothing but numbers."""
    if isinstance(value, ast.Constant):
        return isinstance(value.value, int | float) and value.value != 0
    parts = [child for child in ast.iter_child_nodes(value) if isinstance(child, ast.expr)]
    return isinstance(value, ast.UnaryOp | ast.BinOp) and all(is_typed(part) for part in parts)


def typed_tolerances(source: str) -> list[int]:
    """Lines of calls that bring a typed tolerance."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg in TOLERANCES}
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if any(map(is_typed, given.values())) or (name in COMPARISONS and not given):
            found.append(call.lineno)
    return found


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_no_typed_tolerance(path):
    assert typed_tolerances(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("line", "caught"),
    [
        ("torch.allclose(a, b)", True),
        ("torch.allclose(a, b, rtol=1e-3, atol=0)", True),
        ("assert_close(a, b, rtol=2 * 1e-3, atol=0)", True),
        ("a == pytest.approx(b, rel=-1e-6)", True),
        ("torch.allclose(a, b, rtol=4 * eps, atol=0)", False),
        ("judge(a, law, dtype)", False),
        ("abs(a)", False),
    ],
)
def test_the_lint_sees_what_it_must(line, caught):
    assert bool(typed_tolerances(line)) is caught

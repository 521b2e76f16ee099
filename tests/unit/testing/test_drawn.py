"""Properties on several ranks: the same examples on all, and a failing one told once."""

import pytest

pytestmark = pytest.mark.multirank


@pytest.fixture(scope="module")
def session(sessions):
    return sessions.run("drawn.py")


@pytest.mark.parametrize(
    "name", ["test_all_ranks_draw_the_same", "test_right_afterwards", "test_cases[a]", "test_cases[b]"]
)
def test_ranks_draw_the_same_examples(name, session):
    assert session.cases[name].outcome == "passed"


def test_a_failing_example_is_told_once_by_the_rank_it_fails_on(session):
    said = session.cases["test_fails_on_one_rank"].said
    assert "rank 1: " in said
    assert "\n    size=" in said
    assert "OtherRankFailedError" not in said


def test_a_rank_that_fails_before_a_collective_says_why(session):
    said = session.cases["test_fails_before_a_collective"].said
    assert "assert size < 10" in said
    assert "rank 0 was waiting in barrier" in said


def test_examples_that_differ_are_red(session):
    assert session.cases["test_draws_by_rank"].outcome == "failure"


def test_examples_that_differ_in_number_are_red_soon(session):
    case = session.cases["test_draws_another_number_by_rank"]
    assert "rank 1 will wait for ever: it was waiting in wait_for_ranks" in case.said

"""A seeded fault reaches the ranks of a pool, and what they start."""

import pytest

pytestmark = pytest.mark.multirank


def test_ranks_have_the_fault_of_their_session(sessions):
    session = sessions.run("faulty.py", GLMV_FAULT="labels-unshifted")
    assert [case.outcome for case in session.cases.values()] == ["failure", "failure"]
    assert all("[[1, 2]]" in case.said for case in session.cases.values())


def test_ranks_of_the_next_session_have_it_no_more(sessions):
    session = sessions.run("faulty.py")
    assert [case.outcome for case in session.cases.values()] == ["passed", "passed"]

"""Ranks that ended a red test by their own verdict run the next one; after anything else there are new ones."""

import pytest

pytestmark = pytest.mark.multirank
RED = ("test_says_no", "test_rank_1_says_no", "test_breaks", "test_says_no_with_a_collective_open")


@pytest.fixture(scope="module")
def outcomes(sessions):
    return {name: case.outcome for name, case in sessions.run("kept.py").cases.items()}


@pytest.mark.parametrize("name", RED)
def test_it_is_red(name, outcomes):
    assert outcomes[name] == "failure"


@pytest.mark.parametrize("name", ["test_kept_after_all_said_no", "test_kept_after_one_said_no"])
def test_ranks_in_step_are_kept(name, outcomes):
    assert outcomes[name] == "passed"


@pytest.mark.parametrize("name", ["test_new_after_an_error", "test_new_after_a_collective_left_open"])
def test_ranks_out_of_step_are_replaced(name, outcomes):
    assert outcomes[name] == "passed"

"""A rank that fails, dies, hangs, skips or goes astray is red, soon and by name, and harms no other test."""

import pytest

pytestmark = pytest.mark.multirank
# What is said of each red test: the ranks and their own ends.
RED = {
    "test_killed": ["rank 1 was killed by SIGKILL in the call of", "rank 0 failed then: RuntimeError"],
    "test_exits": ["rank 0 ended its process with exit code 3 in the call of"],
    "test_sleeps": ["rank 1 was not done after 6 s: it stood in test_sleeps", "it was waiting in all_reduce"],
    "test_polls_for_ever": [
        "rank 0 was not done after 6 s: it stood in test_polls_for_ever",
        "rank 1 was not done after 6 s: it stood in test_polls_for_ever",
    ],
    "test_skips_on_one": ["rank 0: passed", "rank 1: skipped (Skipped: not today)"],
    "test_has_other_cases[0]": ["rank 1 collected", "this session collected"],
    "test_mismatched_collective": ["rank 0 will wait for ever: it was waiting in all_reduce", "in broadcast"],
    "test_left_out_collective": ["rank 0 will wait for ever: it was waiting in all_reduce", "rank 1: passed"],
    "test_forgotten_send": ["unlike numbers of collectives"],
    "test_forgotten_send_in_a_group_of_its_own": ["unlike numbers of collectives", "of ranks [0, 1]: rank 0: "],
    "test_fails_before_collective": [
        "rank 1: AssertionError: only rank 0 is right",
        "rank 0 was waiting in all_reduce",
    ],
    "test_fails_alike": ["all 2 ranks: AssertionError", "assert process.world_size == 3"],
    "test_fails_in_different_ways": ["KeyError: 'of rank 0'", "ValueError: of rank 1"],
    "test_setup_fails_on_one": ["rank 1: RuntimeError: no such thing"],
    "test_teardown_fails_on_one": ["rank 1: AssertionError"],
}
# The time limit of all tests there but one: what has to be waited out was not seen.
LIMIT = "was not done after 200 s"


@pytest.fixture(scope="module")
def session(sessions):
    return sessions.run("red.py")


@pytest.mark.parametrize("name", RED)
def test_it_is_red_and_says_who_and_why(name, session):
    case = session.cases[name]
    assert case.outcome in ("failure", "error")
    assert [text for text in RED[name] if text not in case.said] == []


@pytest.mark.parametrize("name", RED)
def test_it_is_red_before_its_time_is_up(name, session):
    assert LIMIT not in session.cases[name].said


def test_the_next_test_is_unharmed(session):
    following = [case.outcome for name, case in session.cases.items() if name.startswith("test_right_after")]
    assert following == ["passed"] * len(following)
    assert len(following) == 13


def test_stacks_of_a_hanging_rank_lead_to_its_line(session):
    assert "in test_sleeps" in session.cases["test_sleeps"].said.partition("stacks of rank 1")[2]


def test_what_a_dead_rank_printed_is_kept(session):
    assert "Captured stdout of rank 0 -" in session.printed
    assert "last words" in session.printed


@pytest.mark.parametrize("name", ["test_skips_alike", "test_xfails_alike"])
def test_what_all_ranks_skip_is_skipped(name, session):
    assert session.cases[name].outcome == "skipped"


def test_the_session_is_red(session):
    assert session.exit_code == 1

"""What every rank does when one of them fails between collectives."""

import pytest

pytestmark = pytest.mark.multirank


def test_a_mistake_is_told_once_and_ends_every_rank_with_its_code(ranks):
    ended = ranks("failing_worker.py", "mistake", nproc=2)
    assert [rank.exit_code for rank in ended.ranks] == [2, 2], ended.describe()
    assert [rank.stderr for rank in ended.ranks] == ["rank 1: no such picture\n", ""]


def test_a_bug_keeps_its_traceback_and_the_other_rank_names_it(ranks):
    ended = ranks("failing_worker.py", "bug", nproc=2)
    assert [rank.exit_code for rank in ended.ranks] == [1, 1], ended.describe()
    assert ended.ranks[0].stderr == "rank 1: stopped by KeyError: 'a bug'\n"
    assert "Traceback" in ended.ranks[1].stderr

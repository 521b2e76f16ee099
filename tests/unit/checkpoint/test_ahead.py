"""Jobs that run ahead in threads."""

import threading

import pytest

from glmv.checkpoint import ahead
from glmv.checkpoint.ahead import run_ahead


def test_results_come_in_order(monkeypatch):
    monkeypatch.setattr(ahead, "WORKERS", 3)
    last = threading.Event()
    jobs = [lambda: last.wait(120), lambda: "second", lambda: last.set() or "third"]
    assert list(run_ahead(jobs)) == [True, "second", "third"]


def test_only_a_few_jobs_are_started_before_a_result_is_taken(monkeypatch):
    monkeypatch.setattr(ahead, "WORKERS", 3)
    asked = []
    results = run_ahead(asked.append(i) or str for i in range(9))
    next(results)
    assert asked == [0, 1, 2]
    results.close()


def test_a_failing_job_raises_where_its_result_is_taken():
    def fails():
        raise KeyError("third")

    results = run_ahead([lambda: 1, lambda: 2, fails, lambda: 4])
    assert [next(results), next(results)] == [1, 2]
    with pytest.raises(KeyError, match="third"):
        next(results)

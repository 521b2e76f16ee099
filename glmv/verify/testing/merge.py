"""One verdict from the reports of several ranks: green only if every rank is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from _pytest._code.code import ExceptionRepr
from _pytest.reports import TestReport

PHASES = ("setup", "call", "teardown")


@dataclass
class Told:
    """What is known of one rank and one test.

    Attributes:
        reports: by phase.   done: the rank went through the whole test.
        problem: why the rank is red although no report says so (died, hung, did not collect the test).
        stack: the rank's Python stacks, where it had to be ended.   collectives: how many it had issued afterwards.
    """

    rank: int
    reports: dict[str, TestReport] = field(default_factory=dict)
    done: bool = False
    problem: str = ""
    stack: str = ""
    collectives: int = 0

    @property
    def failure(self) -> TestReport | None:
        """The first report that is red."""
        return next((report for phase in PHASES if (report := self.reports.get(phase)) and report.failed), None)


def merge(nodeid: str, location: tuple[str, int | None, str], ranks: Sequence[Told]) -> list[TestReport]:
    """One report per phase, of which a red rank makes exactly one red.

    Args:
        nodeid, location: of the test.   ranks: what each rank told, by rank.
    """
    verdict = _verdict(ranks)
    phases = [phase for phase in PHASES if any(phase in told.reports for told in ranks)]
    if verdict is None:
        return [_all_alike(phase, ranks) for phase in phases]
    where, longrepr = verdict
    before = [_plain(nodeid, location, phase, ranks) for phase in PHASES[: PHASES.index(where)]]
    red = _plain(nodeid, location, where, ranks)
    red.outcome, red.longrepr = "failed", longrepr
    after = [] if where == "teardown" else [_plain(nodeid, location, "teardown", ranks)]
    return [*before, red, *after]


def _verdict(ranks: Sequence[Told]) -> tuple[str, ExceptionRepr | str] | None:
    """The phase that is red and why; None if all ranks agree on something better."""
    failed = [told for told in ranks if told.failure is not None]
    problems = [told for told in ranks if told.problem]
    if failed:
        return failed[0].failure.when or "call", _failure(failed, ranks)  # type: ignore[union-attr]
    if problems:
        reached = [phase for phase in PHASES if phase in problems[0].reports]
        return _phase_after(reached), "\n".join(_problem_lines(ranks))
    for phase in PHASES:
        outcomes = [_outcome(told, phase) for told in ranks]
        if len(set(outcomes)) > 1:
            lines = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes)]
            return phase, "\n".join(["the ranks disagree on this test:", *lines])
    if len({told.collectives for told in ranks}) > 1:
        lines = [f"rank {told.rank}: {told.collectives}" for told in ranks]
        return "call", "\n".join(["the ranks have issued unlike numbers of collectives after this test:", *lines])
    return None


def _phase_after(reached: Sequence[str]) -> str:
    return PHASES[min(len(reached), len(PHASES) - 1)]


def _outcome(told: Told, phase: str) -> str:
    report = told.reports.get(phase)
    if report is None:
        return "did not run it"
    reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
    kind = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
    return f"{kind} ({reason})" if reason else kind


def _all_alike(phase: str, ranks: Sequence[Told]) -> TestReport:
    report = ranks[0].reports[phase]
    report.sections = _sections(phase, ranks)
    report.duration = max(told.reports[phase].duration for told in ranks)
    return report


def _plain(nodeid: str, location: tuple[str, int | None, str], phase: str, ranks: Sequence[Told]) -> TestReport:
    known = [told.reports[phase] for told in ranks if phase in told.reports]
    return TestReport(
        nodeid=nodeid,
        location=location,
        keywords=dict(known[0].keywords) if known else {},
        outcome="passed",
        longrepr=None,
        when=phase,  # type: ignore[arg-type]
        sections=_sections(phase, ranks),
        duration=max((report.duration for report in known), default=0.0),
        user_properties=known[0].user_properties if known else [],
    )


def _sections(phase: str, ranks: Sequence[Told]) -> list[tuple[str, str]]:
    """What the ranks printed, the same text once."""
    found: dict[tuple[str, str], list[int]] = {}
    for told in ranks:
        for name, text in told.reports[phase].sections if phase in told.reports else []:
            found.setdefault((name, text), []).append(told.rank)
    return [(f"{name_ranks(who, len(ranks))}: {name}", text) for (name, text), who in found.items()]


def _failure(failed: Sequence[Told], ranks: Sequence[Told]) -> ExceptionRepr | str:
    """The first failing rank's traceback whole, then one short paragraph for each other kind of end."""
    alike: dict[str, list[int]] = {}
    for told in failed:
        assert told.failure is not None
        alike.setdefault(_message(told.failure), []).append(told.rank)
    first, *others = alike.items()
    lines = [f"{name_ranks(who, len(ranks))}: {message}" for message, who in others] + _problem_lines(ranks)
    who, report = name_ranks(first[1], len(ranks)), failed[0].failure
    assert report is not None
    longrepr = report.longrepr
    if not isinstance(longrepr, ExceptionRepr):
        return "\n".join([f"{who}:", str(longrepr), *lines])
    if longrepr.reprcrash is not None:
        longrepr.reprcrash.message = f"{who}: {longrepr.reprcrash.message}"
    longrepr.addsection(f"the traceback above is that of {who}", "\n".join(lines), "-")
    return longrepr


def _message(report: TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = f"{crash.message}\n  at {crash.path}:{crash.lineno}" if crash else str(report.longrepr)
    return f"{text} ({report.when})"


def _problem_lines(ranks: Sequence[Told]) -> list[str]:
    """Why ranks ended without a report, and where they stood. Those that only waited come last."""
    lines = [f"rank {told.rank} {told.problem}" for told in ranks if told.problem]
    lines += [f"rank {told.rank}: passed" for told in ranks if told.done and told.failure is None and not told.problem]
    for told in ranks:
        if told.stack:
            lines += ["", f"stacks of rank {told.rank} when it was ended:", told.stack.rstrip()]
    return lines


def name_ranks(ranks: Sequence[int], world_size: int) -> str:
    """ "rank 1", "ranks 0, 2" or "all 4 ranks"."""
    if len(ranks) == world_size > 1:
        return f"all {world_size} ranks"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"

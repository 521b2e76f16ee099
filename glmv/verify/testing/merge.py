"""One verdict from the reports of several ranks: green only if every rank is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from _pytest._code.code import ExceptionRepr
from _pytest.reports import TestReport

from glmv.verify.testing.lockstep import OtherRankFailedError

PHASES = ("setup", "call", "teardown")


@dataclass
class Told:
    """What is known of one rank and one test.

    Attributes:
        reports: by phase.   done: the rank went through the whole test.   failed_at: when its first red report came.
        problem: why the rank is red although no report says so (died, hung, did not collect the test).
        died: the problem is the rank's own end, of which what others suffered is a consequence.
        stack: the rank's Python stacks, where it had to be ended.
        collectives: how many it had issued afterwards, by process group.
        sound: it could run another test; only errors other than a test's verdict leave it otherwise.
        printed: to stdout and stderr during the test.
    """

    rank: int
    reports: dict[str, TestReport] = field(default_factory=dict)
    done: bool = False
    failed_at: float = 0.0
    problem: str = ""
    died: bool = False
    stack: str = ""
    printed: str = ""
    collectives: dict[str, int] = field(default_factory=dict)
    sound: bool = False

    @property
    def failure(self) -> TestReport | None:
        """The first report that is red."""
        return next((report for phase in PHASES if (report := self.reports.get(phase)) and report.failed), None)


Location = tuple[str, int | None, str]


def merge(nodeid: str, location: Location, ranks: Sequence[Told], seconds: float = 0.0) -> list[TestReport]:
    """One report per phase, of which a red rank makes exactly one red.

    Args:
        nodeid, location: of the test.   ranks: what each rank told, by rank.   seconds: how long they were waited for.
    """
    verdict = _verdict(ranks)
    phases = [phase for phase in PHASES if any(phase in told.reports for told in ranks)]
    if verdict is None:
        reports = [_all_alike(phase, ranks) for phase in phases]
        next((report for report in reports if report.when == "call"), reports[0]).sections += _printed(ranks)
        return reports
    where, longrepr = verdict
    before = [_plain(nodeid, location, phase, ranks) for phase in PHASES[: PHASES.index(where)]]
    red = _plain(nodeid, location, where, ranks)
    red.outcome, red.longrepr = "failed", longrepr
    red.sections += _printed(ranks)
    red.duration = max(red.duration, seconds)
    after = [] if where == "teardown" else [_plain(nodeid, location, "teardown", ranks)]
    return [*before, red, *after]


def _verdict(ranks: Sequence[Told]) -> tuple[str, ExceptionRepr | str] | None:
    """The phase that is red and why; None if all ranks agree on something better."""
    failed = sorted((told for told in ranks if told.failure is not None), key=_cause_first)
    problems = [told for told in ranks if told.problem]
    if failed and not any(told.died for told in ranks):
        return failed[0].failure.when or "call", _failure(failed, ranks)  # type: ignore[union-attr]
    if problems:
        return _phase_after(problems[0]), "\n".join([*_problem_lines(ranks), *_consequences(failed)])
    return _disagreement(ranks)


def _cause_first(told: Told) -> tuple[bool, float]:
    return _is_consequence(told), told.failed_at


def _is_consequence(told: Told) -> bool:
    """The rank failed because it was told that another one had."""
    crash = getattr(getattr(told.failure, "longrepr", None), "reprcrash", None)
    return crash is not None and OtherRankFailedError.__name__ in crash.message


def _disagreement(ranks: Sequence[Told]) -> tuple[str, str] | None:
    for phase in PHASES:
        outcomes = [_outcome(told, phase) for told in ranks]
        if len(set(outcomes)) > 1:
            lines = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes)]
            return phase, "\n".join(["the ranks disagree on this test:", *lines])
    if lines := unlike_collectives(ranks):
        return "call", "\n".join(["the ranks have issued unlike numbers of collectives after this test:", *lines])
    return None


def unlike_collectives(ranks: Sequence[Told]) -> list[str]:
    """A line for each process group in which ranks have issued other numbers of collectives than their peers."""
    lines = []
    for group in dict.fromkeys(group for told in ranks for group in told.collectives):
        issued = {told.rank: told.collectives[group] for told in ranks if group in told.collectives}
        if len(set(issued.values())) > 1:
            lines.append(f"group {group}: " + ", ".join(f"rank {rank}: {n}" for rank, n in issued.items()))
    return lines


def in_step(ranks: Sequence[Told]) -> bool:
    """Whether these ranks can run another test: all went through this one, and left no collective open."""
    return all(told.done and told.sound and not told.problem for told in ranks) and not unlike_collectives(ranks)


def _consequences(failed: Sequence[Told]) -> list[str]:
    return [f"rank {told.rank} failed then: {_message(told.failure)}" for told in failed]


def _phase_after(told: Told) -> str:
    # A rank that was through with the test has another problem than the test: what it collected.
    reached = 0 if told.done else sum(phase in told.reports for phase in PHASES)
    return PHASES[min(reached, len(PHASES) - 1)]


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


def _plain(nodeid: str, location: Location, phase: str, ranks: Sequence[Told]) -> TestReport:
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


def _printed(ranks: Sequence[Told]) -> list[tuple[str, str]]:
    return [(f"Captured stdout of rank {told.rank}", told.printed) for told in ranks if told.printed.strip()]


def _failure(failed: Sequence[Told], ranks: Sequence[Told]) -> ExceptionRepr | str:
    """The first failing rank's traceback whole, then one short paragraph for each other kind of end."""
    alike: dict[tuple[str, ...], list[Told]] = {}
    for told in [told for told in failed if not _is_consequence(told)] or failed:
        alike.setdefault(_kind_of_end(told.failure), []).append(told)
    first, *others = alike.values()
    lines = [f"{_names(group, ranks)}: {_message(group[0].failure)}" for group in others] + _problem_lines(ranks)
    who, longrepr = _names(first, ranks), failed[0].failure.longrepr  # type: ignore[union-attr]
    if not isinstance(longrepr, ExceptionRepr):
        return "\n".join([f"{who}:", str(longrepr), *lines])
    if longrepr.reprcrash is not None:
        longrepr.reprcrash.message = f"{who}: {longrepr.reprcrash.message}"
    longrepr.addsection(f"the traceback above is that of {who}", "\n".join(lines), "-")
    return longrepr


def _kind_of_end(report: TestReport | None) -> tuple[str, ...]:
    """What failures have in common that are one failure, though they quote different values."""
    crash = getattr(getattr(report, "longrepr", None), "reprcrash", None)
    if crash is None:
        return (str(getattr(report, "longrepr", "")),)
    return crash.message.partition("\n")[0], crash.path, str(crash.lineno)


def _message(report: TestReport | None) -> str:
    longrepr = getattr(report, "longrepr", None)
    crash = getattr(longrepr, "reprcrash", None)
    text = f"{crash.message}\n  at {crash.path}:{crash.lineno}" if crash else str(longrepr)
    return f"{text} ({report.when})" if report else text


def _names(group: Sequence[Told], ranks: Sequence[Told]) -> str:
    return name_ranks([told.rank for told in group], len(ranks))


def _problem_lines(ranks: Sequence[Told]) -> list[str]:
    """Why ranks ended without a report, and where they stood: the dead first, those that only waited last."""
    astray = [told for told in ranks if told.problem]
    astray.sort(key=lambda told: 0 if told.died else 2 if "was waiting in" in told.problem else 1)
    lines = [f"rank {told.rank} {told.problem}" for told in astray]
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

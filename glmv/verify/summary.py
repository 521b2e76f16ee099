"""The table that `glmv verify` prints, and the same figures for machines."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from glmv.verify.judge import Finding
from glmv.verify.run import SEQUENCE, Options, PolicyResult, Result, versions
from glmv.verify.steps import KINDS

MISSES_SHOWN = 8


def summary(result: Result, report: Path) -> str:
    """What a person reads at the end: one block a policy, then the verdict."""
    options = result.options
    policies = " + ".join(policy.policy for policy in result.policies)
    rope = "  bf16 rope buffers" if options.buffers == "bf16" else ""
    ranks = f"{options.world_size} ranks ({options.layout}{_sequences(options)})"
    lines = [f"verify  {ranks}  {options.steps} steps  {policies}{rope}"]
    for policy in result.policies:
        lines += _block(policy)
    missed = result.missed
    lines += ["", *missed[:MISSES_SHOWN]]
    if len(missed) > MISSES_SHOWN:
        lines.append(f"... and {len(missed) - MISSES_SHOWN} more, all in {report.parent / 'verify.json'}")
    verdict = f"FAIL ({len(missed)} over budget)" if missed else "PASS"
    minutes, seconds = divmod(round(result.seconds), 60)
    return "\n".join([*lines, f"{verdict} in {minutes} min {seconds} s   {report}"])


def _sequences(options: Options) -> str:
    """`, ring 2 in fp32, ulysses 2 in bf16`, or nothing."""
    if options.sharers == 1:
        return ""
    ways = {policy: SEQUENCE[policy].split("_")[0] for policy in options.policies}
    return "".join(f", {way} {options.sharers} in {policy}" for policy, way in ways.items())


def worst(policy: PolicyResult, kind: str) -> tuple[int, Finding]:
    """(step, finding) of the worst finding of one kind over all steps."""
    found = [(verdict.step, finding) for verdict in policy.steps for finding in verdict.findings[kind][:1]]
    return max(found, key=lambda pair: pair[1].used)


def _block(policy: PolicyResult) -> list[str]:
    lines = []
    for kind in KINDS:
        step, finding = worst(policy, kind)
        name = "" if kind == "loss" else f"{finding.name}, "
        lines.append(f"  {policy.policy}  {kind:<10} used {finding.used:<7.2g} {name}step {step}")
    lines.append(f"  {policy.policy}  {'scale':<10} used {policy.mean.used:<7.2g} {policy.mean.name}")
    for label, findings in (("start", policy.start), ("export", policy.export)):
        wrong = sum(finding.used > 1 for finding in findings)
        state = "bit-equal" if not wrong else f"{wrong} differ"
        lines.append(f"  {policy.policy}  {label:<10} {state:<12} {len(findings)} tensors")
    used = max(finding.used for finding in policy.hf_logits)
    lines.append(f"  {policy.policy}  {'HF logits':<10} used {used:<7.2g} of the export, loaded by transformers")
    return lines


def machine_readable(result: Result) -> dict[str, Any]:
    """Everything of the verdict as JSON values: `verify.json`."""
    return {
        "passed": not result.missed,
        "seconds": round(result.seconds, 1),
        "versions": versions(),
        "options": {key: str(value) for key, value in dataclasses.asdict(result.options).items()},
        "missed": result.missed,
        "policies": {policy.policy: _policy(policy) for policy in result.policies},
    }


def _policy(policy: PolicyResult) -> dict[str, Any]:
    steps = [
        {
            "step": verdict.step,
            "loss": _number(verdict.loss),
            "law_loss": verdict.law_loss,
            "explanation": verdict.explanation,
            "worst": {kind: _finding(verdict.findings[kind][0]) for kind in KINDS},
        }
        for verdict in policy.steps
    ]
    return {
        "steps": steps,
        "mean": _finding(policy.mean),
        "hf_logits": _finding(max(policy.hf_logits, key=lambda finding: finding.used)),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    values = {**dataclasses.asdict(finding), "used": finding.used}
    return {key: _number(value) if isinstance(value, float) else value for key, value in values.items()}


def _number(value: float) -> float | str:
    """JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else str(value)


def write_json(result: Result, path: Path) -> None:
    """Write `verify.json`."""
    path.write_text(json.dumps(machine_readable(result), indent=1, allow_nan=False), encoding="utf-8")

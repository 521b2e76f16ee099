"""report/index.html: one page, no network, with the loss curves and how much of every budget was used."""

from __future__ import annotations

import html
import io
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from glmv.verify.budgets import classify
from glmv.verify.judge import Finding
from glmv.verify.run import PolicyResult, Result, versions
from glmv.verify.steps import KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"fp32": "#1f6f8b", "bf16": "#c8553d"}
ROWS = 25
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>glmv verify: {verdict}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #222; }}
h1 span {{ color: {colour}; }}
h2 {{ margin-top: 2.2rem; border-bottom: 1px solid #ddd; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13px; }}
td, th {{ text-align: left; padding: .2rem .6rem .2rem 0; border-bottom: 1px solid #eee; vertical-align: top; }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }}
code, pre {{ font: 13px/1.4 ui-monospace, monospace; }}
pre {{ background: #fdf1ee; padding: .8rem; overflow-x: auto; }}
svg {{ max-width: 100%; height: auto; }}
.over {{ color: #b00020; font-weight: 600; }}
</style></head><body>
<h1>glmv verify: <span>{verdict}</span></h1>
<p>{setting}</p>
{misses}
<h2>Loss</h2>
<p>The run's own loss, and the law's float64 loss from the same weights before each step. The lines lie on each other
when the run is healthy; a loss curve alone proves little, which is why everything below is judged too.</p>
{loss}
<h2>Budgets used, step by step</h2>
<p>Worst error of each step over what measured rounding noise allows. 1 is the limit.</p>
{by_step}
<h2>Budgets used, by class of tensor</h2>
{by_class}
<h2>Closest to their budget</h2>
{table}
</body></html>
"""


def write_report(result: Result, directory: Path) -> Path:
    """Write `index.html` and return its path.

    Raises:
        ImportError: matplotlib is missing (`pip install 'glmv[report]'`).
    """
    missed = result.missed
    page = PAGE.format(
        verdict=f"FAIL, {len(missed)} over budget" if missed else "PASS",
        colour="#b00020" if missed else "#1b7f4d",
        setting=html.escape(_setting(result)),
        misses=f"<h2>Over budget</h2><pre>{html.escape(chr(10).join(missed))}</pre>" if missed else "",
        loss=_svg(_loss_figure(result)),
        by_step=_svg(_step_figure(result)),
        by_class=_svg(_class_figure(result)),
        table=_table(result),
    )
    path = directory / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


def _setting(result: Result) -> str:
    options = result.options
    parts = [f"{options.world_size} ranks ({options.layout}), {options.steps} steps, {result.seconds:.0f} s"]
    return ", ".join(parts + [f"{name} {version}" for name, version in versions().items()])


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    nameless = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(text, format="svg", bbox_inches="tight", metadata=nameless)
    return text.getvalue()[text.getvalue().index("<svg") :]


def _figure(width: float, height: float, panels: int) -> tuple[Figure, list]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def _loss_figure(result: Result) -> Figure:
    figure, axes = _figure(10, 3, len(result.policies))
    for axis, policy in zip(axes, result.policies, strict=True):
        steps = [verdict.step for verdict in policy.steps]
        law, own = [v.law_loss for v in policy.steps], [v.loss for v in policy.steps]
        axis.plot(steps, law, color="#bbb", linewidth=5, label="law, float64")
        axis.plot(steps, own, color=COLOURS[policy.policy], label=f"run, {policy.policy}")
        axis.set(xlabel="step", ylabel="loss")
        axis.legend(frameon=False)
    return figure


def _step_figure(result: Result) -> Figure:
    figure, axes = _figure(10, 3, len(KINDS))
    for axis, kind in zip(axes, KINDS, strict=True):
        for policy in result.policies:
            used = [min(verdict.findings[kind][0].used, 1e6) for verdict in policy.steps]
            steps = [verdict.step for verdict in policy.steps]
            axis.plot(steps, used, color=COLOURS[policy.policy], label=policy.policy)
        axis.axhline(1, color="#b00020", linewidth=0.8)
        axis.set(title=kind, xlabel="step", ylim=(0, None))
    axes[0].legend(frameon=False)
    return figure


def _class_figure(result: Result) -> Figure:
    bars: dict[str, dict[str, float]] = defaultdict(dict)
    for policy in result.policies:
        for verdict in policy.steps:
            for finding in verdict.findings["gradients"]:
                row = bars[classify(finding.name).name]
                row[policy.policy] = max(row.get(policy.policy, 0.0), min(finding.used, 1e6))
    figure, (axis,) = _figure(10, 0.45 * len(bars) + 1, 1)
    height = 0.8 / len(result.policies)
    for offset, policy in enumerate(result.policies):
        places = [row + offset * height for row in range(len(bars))]
        used = [row.get(policy.policy, 0.0) for row in bars.values()]
        axis.barh(places, used, height, color=COLOURS[policy.policy], label=policy.policy)
    axis.axvline(1, color="#b00020", linewidth=0.8)
    axis.set_yticks([row + height / 2 for row in range(len(bars))], list(bars))
    axis.set(xlabel="gradients: worst share of the budget over all steps")
    axis.invert_yaxis()
    axis.legend(frameon=False)
    return figure


def _table(result: Result) -> str:
    rows = [
        (policy, verdict.step, finding)
        for policy in result.policies
        for verdict in policy.steps
        for kind in KINDS
        for finding in verdict.findings[kind][:3]
    ]
    rows.sort(key=lambda row: row[2].used, reverse=True)
    head = "<tr><th>used<th>tensor<th>figure<th>error<th>allowed<th>where<th>policy, step</tr>"
    return f"<table>{head}{''.join(_row(*row) for row in rows[:ROWS])}</table>"


def _row(policy: PolicyResult, step: int, finding: Finding) -> str:
    over = ' class="over"' if finding.used > 1 else ""
    return (
        f"<tr{over}><td class=number>{finding.used:.3g}<td><code>{html.escape(finding.name)}</code>"
        f"<td>{html.escape(finding.figure)}<td class=number>{finding.error:.2e}<td class=number>{finding.allowed:.2e}"
        f"<td>{html.escape(finding.where)}<td>{policy.policy}, {step}</tr>"
    )

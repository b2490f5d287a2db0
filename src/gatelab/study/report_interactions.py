"""Whether a difference between two arms depends on a change to both, as a section of a study's report."""

from __future__ import annotations

import math

from gatelab.report.charts import Reference, dot_interval_chart
from gatelab.report.page import Figure, Section
from gatelab.report.tables import Column, Linked, Table
from gatelab.study.findings import LOSS, OVER_FLOOR, Dependence, Findings
from gatelab.study.report_tables import COMPARISONS, estimate_cells
from gatelab.study.statistics import Estimate

TITLE = "Does it depend on something else?"
_TEXT = (
    "The difference between two arms that both have a change, less that of the same two without it: 0 where the change "
    "makes no difference to the difference. Both are of the same seeds. These are estimates and no verdicts: each "
    "interval misses the true value in 1 of 20 studies."
)
_CHANGE = Column("change", "change")


def interactions_section(findings: Findings) -> Section:
    """The study's interactions in its metric, and what they are in the other figures; empty without any."""
    content = [interaction_table(findings), *_figure(findings), other_figures_table(findings)]
    return Section(TITLE, _TEXT, [item for item in content if item is not None])


def interaction_table(findings: Findings) -> Table | None:
    """A row for each interaction: both differences, and the one less the other, with 95 % t intervals over seeds."""
    metric, num_seeds = findings.metric, len(findings.study.seeds)
    known = [one for one in findings.dependences(metric) if one.difference is not None]
    rows = [
        {
            "change": one.name,
            "seeds": f"{one.num_pairs} of {num_seeds}",
            **estimate_cells("difference", one.difference),
            **estimate_cells("changed", one.changed),
            **estimate_cells("plain", one.plain),
        }
        for one in known
    ]
    signed = f"+{metric.format}"
    columns = [
        _CHANGE,
        *([] if all(one.num_pairs == num_seeds for one in known) else [Column("seeds", "seeds", align="right")]),
        Column("difference", "difference", signed),
        Column("difference_interval", "95 %", signed),
        Column("changed", "with it", signed),
        Column("changed_interval", "95 %", signed),
        Column("plain", "without it", signed),
        Column("plain_interval", "95 %", signed),
    ]
    unit = " in nats per token" if metric.key == LOSS else ""
    arms = "; ".join(
        f"{one.name}, {' less '.join(one.changed)} against {' less '.join(one.plain)}"
        for one in findings.study.interactions
    )
    caption = f"Differences in {metric.title}{unit}: {arms}. Intervals: Student's t over seeds, paired by seed."
    return Table(columns, rows, caption) if rows else None


def other_figures_table(findings: Findings) -> Table | None:
    """The difference of differences in every other figure that the four arms have."""
    rows = []
    for quantity in findings.quantities:
        found = {one.name: one.difference for one in findings.dependences(quantity) if one.difference is not None}
        if found and quantity.key != findings.metric.key and not quantity.key.endswith(OVER_FLOOR):
            texts = {name: Linked(_text(one, quantity.format), COMPARISONS) for name, one in found.items()}
            rows.append({"figure": quantity.title, **texts})
    names = [one.name for one in findings.study.interactions]
    columns = [Column("figure", "figure"), *(Column(name, name, align="right") for name in names)]
    caption = "The same difference of differences in what was measured inside the models."
    return Table(columns, rows, caption) if rows else None


def _figure(findings: Findings) -> list[Figure]:
    known = [one for one in findings.dependences(findings.metric) if _has_interval(one)]
    rows = [{"change": one.name, **one.difference._asdict()} for one in known if one.difference is not None]
    if not rows:
        return []
    value = Column("value", f"difference of differences in {findings.metric.title}", f"+{findings.metric.format}")
    reference = Reference("no dependence", 0.0)
    chart = dot_interval_chart(rows, _CHANGE, value, ("low", "high"), "What a change adds", reference=reference)
    caption = "Left of zero the first arm has less, against the second, with the change than without it."
    return [Figure(chart, caption, "Intervals: Student's t over seeds of the differences of paired differences.")]


def _has_interval(one: Dependence) -> bool:
    return one.difference is not None and not math.isnan(one.difference.low)


def _text(estimate: Estimate, format: str) -> str:
    value, *ends = (f"{one:+{format}}" for one in estimate)
    return value if math.isnan(estimate.low) else f"{value} [{', '.join(ends)}]"

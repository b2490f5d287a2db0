"""The figures of a study's report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import mean

from gatelab.report.charts import Chart, Reference, bar_chart, dot_interval_chart, line_chart
from gatelab.report.page import Figure
from gatelab.report.tables import Column
from gatelab.study.findings import Findings, Quantity, mean_over_seeds
from gatelab.study.run_curves import Row, RunCurve, bands

_MOST_LINES = 7
_BAND = "The line is the mean over seeds, the band reaches from the least to the greatest."
LOSS_DEFINITION = "Mean cross-entropy over target tokens, nats per token."
FIRST_TOKEN_DEFINITION = (
    "Mean over the queries of the attention probability on token 0, then over heads. Uniform attention gives the mean "
    "of 1/(t+1) over the same queries, the floor."
)


def difference_figure(findings: Findings) -> list[Figure]:
    """Every arm's difference from the baseline in the metric, with its interval."""
    metric, study = findings.metric, findings.study
    rows = [
        {"arm": arm, **one.difference._asdict()}
        for arm, one in findings.comparisons.items()
        if one.difference is not None
    ]
    if not rows:
        return []
    value = Column("value", f"{metric.title}, minus that of {study.baseline}", f"+{metric.format}")
    chart = dot_interval_chart(
        rows,
        _arm(findings),
        value,
        ("low", "high"),
        f"Difference from {study.baseline}",
        reference=Reference("no difference", 0.0),
    )
    over = {one.over for one in findings.comparisons.values() if one.difference is not None}
    seeds = "Student's t over seeds of the paired differences"
    documents = "a bootstrap over the held-out documents (2,000 resamples), which knows nothing of other seeds"
    kinds = [text for kind, text in (("seeds", seeds), ("documents", documents)) if kind in over]
    caption = "Left of zero an arm has less than the baseline. Each interval is at 95 % by itself."
    return [Figure(chart, caption, f"Intervals: {'; '.join(kinds)}.")]


def learning_figures(findings: Findings, curves: Sequence[RunCurve]) -> list[Figure]:
    """Training and held-out loss over the steps."""
    training = bands(curves, lambda curve: curve.training, "loss")
    heldout = bands(curves, lambda curve: curve.evaluations, "loss")
    loss = Column("value", "cross-entropy", ".3f", "nats per token")
    read = "All arms read the same batches in the same order, unless an arm declares otherwise."
    return [
        *_curves(findings, training, loss, "Training loss", f"{_BAND} Each point is a median of its steps. {read}"),
        *_curves(findings, heldout, loss, "Held-out loss on the way", f"{_BAND} Scored on some of the held-out text."),
    ]


def attention_figures(findings: Findings, curves: Sequence[RunCurve], quantities: Sequence[Quantity]) -> list[Figure]:
    """First-token attention while training and after it, against its floor."""
    figures = []
    for quantity in quantities:
        floors = findings.floors(quantity)
        reference = Reference("uniform attention", floors[0]) if len(floors) == 1 else None
        figures += figures_on_the_way(findings, curves, quantity, FIRST_TOKEN_DEFINITION, reference)
        title = f"{_capital(quantity)}, after training"
        figures += quantity_figure(findings, quantity, title, FIRST_TOKEN_DEFINITION, reference)
    return figures


def figures_on_the_way(
    findings: Findings,
    curves: Sequence[RunCurve],
    quantity: Quantity,
    definition: str,
    reference: Reference | None = None,
) -> list[Figure]:
    """What the runs measured of a figure while they trained."""
    rows = bands(curves, lambda curve: curve.measurements, quantity.key)
    value = Column("value", quantity.title, quantity.format)
    caption = f"{_BAND} Measured on a few held-out windows."
    return _curves(findings, rows, value, f"{_capital(quantity)}, while training", caption, definition, reference)


def quantity_figure(
    findings: Findings, quantity: Quantity, title: str, definition: str, reference: Reference | None = None
) -> list[Figure]:
    """One figure of every arm after training, mean over seeds with its t interval."""
    rows = []
    for arm, runs in findings.compared.items():
        found = mean_over_seeds([quantity.of(one) for one in runs])
        if found is not None:
            low, high = (None, None) if math.isnan(found.low) else (found.low, found.high)
            rows.append({"arm": arm, "value": found.value, "low": low, "high": high})
    if not rows:
        return []
    value = Column("value", quantity.title, quantity.format)
    if all(row["low"] is None for row in rows):
        return [Figure(bar_chart(rows, _arm(findings), value, title, reference=reference), "One seed.", definition)]
    chart = dot_interval_chart(rows, _arm(findings), value, ("low", "high"), title, reference=reference)
    return [Figure(chart, "Mean over seeds with a 95 % t interval.", definition)]


def rate_figures(findings: Findings) -> list[Figure]:
    """Validation loss over the grid of learning rates."""
    tuned = [one for one in findings.results if one.purpose == "tuning"]
    rows: list[Row] = []
    for arm in findings.study.arms:
        for rate in findings.study.learning_rates:
            losses = [one.heldout_loss for one in tuned if (one.arm, one.learning_rate) == (arm.name, rate)]
            finite = [loss for loss in losses if loss is not None]
            if finite and len(finite) == len(losses):
                rows.append({"arm": arm.name, "rate": rate, "value": mean(finite)})
                rows[-1] |= {"low": min(finite), "high": max(finite)}
    caption = (
        "Mean over the tuning seeds, on validation text; the band reaches from the least to the greatest. A line ends "
        "where a run diverged."
    )
    rate, loss = Column("rate", "learning rate", "g"), Column("value", "validation loss", ".3f", "nats per token")

    def draw(part: Sequence[Row], series: Column, title: str) -> Chart:
        return line_chart(part, rate, loss, series, title, log_x=True, band=("low", "high"))

    return _grouped(findings, rows, draw, "Loss by learning rate", caption, LOSS_DEFINITION)


def _capital(quantity: Quantity) -> str:
    return f"{quantity.title[0].upper()}{quantity.title[1:]}"


def _curves(
    findings: Findings,
    rows: Sequence[Row],
    value: Column,
    title: str,
    caption: str,
    definition: str = LOSS_DEFINITION,
    reference: Reference | None = None,
) -> list[Figure]:
    """Lines over training steps."""
    step = Column("step", "training step", ",d")

    def draw(part: Sequence[Row], series: Column, title: str) -> Chart:
        return line_chart(part, step, value, series, title, band=("low", "high"), reference=reference)

    return _grouped(findings, rows, draw, title, caption, definition)


def _grouped(
    findings: Findings,
    rows: Sequence[Row],
    draw: Callable[[Sequence[Row], Column, str], Chart],
    title: str,
    caption: str,
    definition: str,
) -> list[Figure]:
    """A chart of the baseline and up to six arms, which have a colour each, and another for each six more."""
    base, groups, figures = findings.study.baseline, _groups(findings), []
    for number, group in enumerate(groups, start=1):
        names = [base, *group]
        part = [row for name in names for row in rows if row["arm"] == name]
        if {row["arm"] for row in part} - {base} or (part and number == 1):
            of_many = f", {number} of {len(groups)}" if len(groups) > 1 else ""
            chart = draw(part, Column("arm", "arm", names=names), f"{title}{of_many}")
            figures.append(Figure(chart, caption, definition))
    return figures


def _groups(findings: Findings) -> list[list[str]]:
    """The other arms by six."""
    others = [arm.name for arm in findings.study.arms if arm.name != findings.study.baseline]
    return [others[first : first + _MOST_LINES - 1] for first in range(0, len(others), _MOST_LINES - 1)]


def _arm(findings: Findings) -> Column:
    """The column of arms that gives each the colour that it has among its group's lines.

    The baseline's name, which is first in each group, is taken once; a blank holds its place in the later ones.
    """
    names = [findings.study.baseline]
    for number, group in enumerate(_groups(findings)):
        names += [*([" " * number] if number else []), *group]
    return Column("arm", "arm", names=names)

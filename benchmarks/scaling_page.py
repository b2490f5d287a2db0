"""The results of ``benchmarks/scaling.py`` as tables and a page of charts with logarithmic axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from goals import interval_text

from gatelab.report.charts import line_chart
from gatelab.report.page import Figure, Page, Section
from gatelab.report.tables import Column, Table

_TITLES = {"context": "T, tokens of a sequence", "width": "D, channels", "depth": "L, layers"}


def fits_table(found: Mapping[str, Any]) -> Table:
    """The exponents of each model along each axis."""
    columns = [
        Column("axis", "against"),
        Column("model", "model"),
        Column("time", "exponent of time", align="right"),
        Column("flops", "of operations", ".3f"),
        Column("memory", "of memory", align="right"),
    ]
    rows = [
        {
            "axis": fit["axis"],
            "model": fit["model"],
            "time": interval_text(fit["time"], ".3f"),
            "flops": fit["flops"],
            "memory": fit["memory"] and interval_text(fit["memory"], ".3f"),
        }
        for fit in found["fits"]
    ]
    caption = "Least squares on logarithms, fitted in each round: the median, and its 95 % interval over rounds."
    return Table(columns, rows, caption)


def sizes_table(found: Mapping[str, Any]) -> Table:
    """The step at each size."""
    columns = [
        Column("axis", "against"),
        Column("size", "size", ",d"),
        Column("model", "model"),
        Column("time", "a step, s", align="right"),
        Column("speed", "GFLOP/s", ",.0f"),
        Column("memory", "memory, MB", align="right"),
        Column("ready", "ready after, s", ".0f"),
    ]
    rows = [
        {
            **{name: row[name] for name in ("axis", "size", "model")},
            "time": interval_text(row["time"], ".3f"),
            "speed": row["flops"] / row["time"]["value"] / 1e9,
            "memory": row["memory"] and interval_text(row["memory"], ",.0f"),
            "ready": row["start"]["ready"],
        }
        for row in found["rows"]
    ]
    return Table(columns, rows, f"Medians of {found['rounds']} rounds, with 95 % intervals.")


def scaling_page(found: Mapping[str, Any], command: str) -> Page:
    """A chart of time for each axis, of memory for the context, and the tables."""
    axes = dict.fromkeys(fit["axis"] for fit in found["fits"])
    figures = [_figure(found, axis, "time", "time of a step", "s") for axis in axes]
    if "context" in axes and all(fit["memory"] for fit in found["fits"]):
        figures.append(_figure(found, "context", "memory", "memory of a step", "MB"))
    lead = "; ".join(
        f"{fit['model']}: time goes with {fit['axis']} to the {interval_text(fit['time'], '.2f')}"
        for fit in found["fits"]
    )
    text = f"{found['tokens']:,d} tokens a step, {found['rounds']} rounds; allocator {found['machine']['allocator']}."
    return Page(
        title="How a training step grows",
        lead=lead,
        command=command,
        sections=[Section("Time and memory", text, [fits_table(found), *figures, sizes_table(found)])],
        environment=dict(found["machine"]),
    )


def _figure(found: Mapping[str, Any], axis: str, figure: str, title: str, unit: str) -> Figure:
    """One line for each model, named with its exponent."""
    names = {
        fit["model"]: f"{fit['model']}, exponent {interval_text(fit[figure], '.2f')}"
        for fit in found["fits"]
        if fit["axis"] == axis
    }
    rows = [
        {"model": names[row["model"]], "size": row["size"], **row[figure]}
        for row in found["rows"]
        if row["axis"] == axis
    ]
    chart = line_chart(
        rows,
        Column("size", _TITLES[axis], ",d"),
        Column("value", title, ".3g", unit=unit),
        Column("model", "model"),
        f"{title.capitalize()} against {axis}",
        log_x=True,
        log_y=True,
        band=("low", "high"),
    )
    definition = "The exponent is the slope by least squares on logarithms, its interval over rounds."
    return Figure(chart, f"{title.capitalize()} against {axis}.", definition, "Medians with 95 % intervals.")

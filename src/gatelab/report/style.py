"""How every chart looks: colours, dashes, shapes, axes and legends, said once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import altair as alt

from gatelab.report.tables import Column

DASHES = [[1, 0], [6, 3], [2, 2], [9, 3, 2, 3], [12, 3], [4, 2, 1, 2, 1, 2]]
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down"]

LONGEST_LABEL = 240  # pixels; a longer name is cut with an ellipsis, and whole in tooltip and table

NAME_AXIS = alt.Axis(labelPadding=8, ticks=False, domain=False, grid=False)
CELL_AXIS = alt.Axis(labelAngle=0, labelOverlap="greedy", ticks=False, domain=False, grid=False)


@dataclass(frozen=True)
class Colors:
    """The colours of one chart; each is any CSS colour. ``series`` is repeated where there are more series."""

    text: str
    muted: str
    grid: str
    background: str
    series: tuple[str, ...]


PAPER = Colors(
    text="#1b1e23",
    muted="#5c636d",
    grid="#e4e6e9",
    background="#ffffff",
    series=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f"),
)
"""Okabe and Ito's colours and a grey, without yellow and black, which vanish on white paper and on a dark page."""


def chart_config(colors: Colors, font: str = "Helvetica, Arial, sans-serif") -> dict[str, Any]:
    """Vega-Lite's configuration for a chart in these colours."""
    return {
        "background": colors.background,
        "font": font,
        "padding": 4,
        "customFormatTypes": True,
        "view": {"stroke": None},
        "title": {"anchor": "start", "fontSize": 14, "fontWeight": 600, "offset": 14, "color": colors.text},
        "axis": {
            "labelColor": colors.muted,
            "titleColor": colors.text,
            "labelFontSize": 11,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "titlePadding": 10,
            "gridColor": colors.grid,
            "domainColor": colors.muted,
            "tickColor": colors.muted,
            "tickSize": 4,
        },
        "axisX": {"grid": False},
        "axisY": {"domain": False, "ticks": False, "labelLimit": LONGEST_LABEL},
        "header": {
            "labelColor": colors.text,
            "labelFontSize": 12,
            "labelFontWeight": 600,
            "labelLimit": 260,
            "labelAnchor": "start",
        },
        "legend": {
            "orient": "top",
            "direction": "horizontal",
            "title": None,
            "labelColor": colors.text,
            "titleColor": colors.text,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "titleLimit": 0,
            "labelLimit": LONGEST_LABEL,
            "symbolStrokeWidth": 2,
            "symbolSize": 500,
            "columnPadding": 20,
            "offset": 18,
        },
        "mark": {"color": colors.series[0]},
        "rule": {"color": colors.muted},
        "line": {"strokeWidth": 2, "strokeCap": "butt", "strokeJoin": "round"},
        "point": {"size": 46},
        "text": {"color": colors.muted, "fontSize": 11},
        "style": {"halo": {"stroke": colors.background, "strokeWidth": 4, "strokeJoin": "round"}},
        "range": {"category": list(colors.series), "heatmap": {"scheme": "cividis"}},
    }


def color_of(series: Column, names: Sequence[str], symbol: str | None = None) -> alt.Color:
    """Colour by series in the order of the column's own names, else of ``names``.

    With a ``symbol`` it has a legend where there are two or more.
    """
    legend = alt.Legend(title=None, symbolType=symbol, values=names) if len(names) > 1 and symbol else None
    scale = alt.Scale(domain=series.names or names)
    return alt.Color(field=series.key, type="nominal", scale=scale, sort=None, legend=legend)


def legend_entry_width(names: Sequence[object]) -> int:
    """About how many pixels one entry of a legend of these names takes."""
    return 60 + min(LONGEST_LABEL, max(7 * len(str(name)) for name in names))


def dash_of(series: Column, names: Sequence[str]) -> alt.StrokeDash:
    """A dash for each series, so that lines differ in grey too; it shares the colour's legend."""
    domain = series.names or names
    scale = alt.Scale(domain=domain, range=list(islice(cycle(DASHES), len(domain))))
    legend = alt.Legend(title=None, symbolType="stroke", values=names) if len(names) > 1 else None
    return alt.StrokeDash(field=series.key, type="nominal", scale=scale, sort=None, legend=legend)


def shape_of(series: Column, names: Sequence[str]) -> alt.Shape:
    """A point shape for each series."""
    domain = series.names or names
    scale = alt.Scale(domain=domain, range=list(islice(cycle(SHAPES), len(domain))))
    return alt.Shape(field=series.key, type="nominal", scale=scale, sort=None, legend=None)


def tooltip_of(columns: Sequence[Column]) -> list[alt.Tooltip]:
    """Every column's value under the pointer."""
    return [alt.Tooltip(field=column.key, title=column.heading, **_value_format(column)) for column in columns]


def text_of(column: Column) -> alt.Text:
    """A column's value as a label beside its mark."""
    return alt.Text(field=column.key, **_value_format(column))


def _value_format(column: Column) -> dict[str, Any]:
    if column.format:
        return {"type": "quantitative", "format": column.format}
    # Vega-Lite 6.4 loses plain text in the tooltip of the nearest point (its pull request 9707), not formatted text.
    return {"type": "nominal", "format": "", "formatType": "toString"}


def axis_of(column: Column, values: Sequence[float]) -> alt.Axis:
    """The axis of a column of numbers; between whole numbers there is no tick."""
    whole = bool(values) and all(isinstance(value, int) for value in values)
    num_ticks = max(1, min(6, max(values) - min(values))) if whole else 6
    return alt.Axis(tickCount=num_ticks, labelOverlap="greedy", labelSeparation=8, **scale_format(column))


def scale_of(values: Sequence[float], *, log: bool = False, **options: Any) -> alt.Scale:
    """A scale over these values that need not start at zero; around a single value it is linear and has a width."""
    if len(set(values)) == 1:
        width = abs(values[0]) / 10 or 1.0
        return alt.Scale(domain=[values[0] - width, values[0] + width], **options)
    return alt.Scale(**{"type": "log", "nice": False, **options}) if log else alt.Scale(zero=False, **options)


def log_ticks(values: Sequence[float]) -> list[float]:
    """Ticks 1, 2 and 5 of each power of ten around positive values; powers alone where those are more than three.

    Where fewer than two of them lie between the values, their ends and middle, to three digits.
    """
    least, most = min(values), max(values)
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    steps = (1, 2, 5) if high - low <= 3 else (1,)
    ticks = [step * 10.0**power for power in range(low, high + 1) for step in steps]
    if sum(least <= tick <= most for tick in ticks) < 2:
        return [float(f"{tick:.3g}") for tick in (least, math.sqrt(least * most), most)]
    return ticks


def scale_format(column: Column) -> dict[str, Any]:
    """How an axis or legend writes a column's numbers: percentages as such, the rest as Vega finds readable."""
    return {"format": f"{column.format[:-1]}~%"} if column.format.endswith("%") else {}

"""Tidy rows to charts: one definition is drawn on the page and written as SVG, PDF and PNG.

Each function takes rows (a list of dicts), the columns to show and a title, and returns an Altair chart that carries
its rows and the columns of their table. Series differ by colour (Okabe and Ito's palette, which colour-blind readers
can tell apart) and by dash or shape, so that a chart printed in grey still reads. A number that is not finite is a
gap in the drawing and stands by its name in tooltip and table. All functions raise ``ValueError`` for no rows and for
a missing column.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import altair as alt
import vl_convert

from gatelab.files import write_atomically
from gatelab.report import style
from gatelab.report.rows import Rows, numbers_of, tidy, values_of
from gatelab.report.tables import Column, Table

Chart = alt.Chart | alt.LayerChart | alt.FacetChart

VEGA_LITE_VERSION = alt.SCHEMA_VERSION.removeprefix("v").rpartition(".")[0]

_WIDTH, _HEIGHT = 620, 280
_MOST_POINTS_DRAWN = 40  # of one series; a longer line shows only the point under the pointer


@dataclass(frozen=True)
class Reference:
    """A value to compare with, drawn as a dashed rule with its label: a floor, or the zero of a difference.

    ``value`` is one number, or one for each series by name.
    """

    label: str
    value: float | Mapping[str, float]


def line_chart(
    rows: Rows,
    x: Column,
    y: Column,
    series: Column,
    title: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    band: tuple[str, str] | None = None,
    reference: Reference | None = None,
) -> Chart:
    """One line for each series, in the order of ``x``.

    ``band`` names the two columns of an interval around ``y``, shaded. On an axis with ``log_x`` or ``log_y`` a value
    that is not positive is a ``ValueError``.
    """
    edges = _interval_columns(y, band) if band else []
    columns = [series, x, y, *edges]
    data = tidy(rows, columns, title)
    values = numbers_of(data, [y, *edges])
    places = numbers_of(data, [x])
    for column, numbers, is_log in ((x, places, log_x), (y, values, log_y)):
        if is_log and min(numbers, default=0) <= 0:
            raise ValueError(f"{title!r} has a logarithmic axis, but the values of {column.key!r} are not all positive")
    names = values_of(data, series)
    x_scale = style.scale_of(places, log=log_x, nice=False)
    x_axis = _quantity(alt.X, x, data, scale=x_scale, **_log_ticks(x, places, log_x))
    y_scale = style.scale_of(values + _reference_values(reference), log=log_y, padding=16)
    y_axis = _quantity(alt.Y, y, data, scale=y_scale, **_log_ticks(y, values, log_y))
    color = style.color_of(series, names)

    layers = []
    if band:
        low, high = alt.Y(field=edges[0].key, type="quantitative", title=y.heading), alt.Y2(field=edges[1].key)
        layers.append(alt.Chart().mark_area(opacity=0.18).encode(x_axis, low, high, color))
    shown = alt.selection_point(name="shown", fields=[series.key], bind="legend")
    opacity = alt.when(shown).then(alt.value(1.0)).otherwise(alt.value(0.15))
    lines = alt.Chart(name="lines").mark_line().encode(x_axis, y_axis, style.dash_of(series, names), opacity=opacity)
    layers.append(lines.encode(style.color_of(series, names, symbol="stroke")).add_params(shown))
    points = alt.Chart(name="points").mark_point(filled=True)
    points = points.encode(x_axis, y_axis, color, style.shape_of(series, names), tooltip=style.tooltip_of(columns))
    if len(data) > _MOST_POINTS_DRAWN * len(names):
        hover = alt.selection_point(name="hover", on="pointerover", nearest=True)
        opacity = alt.when(hover, empty=False).then(alt.value(1.0)).otherwise(alt.value(0.0))
        points = points.properties(name="hover").add_params(hover)
    layers.append(points.encode(opacity=opacity))
    if reference:
        layers += _reference_layers(reference, y, series, data, channel="y")
    return _finish(alt.layer(*layers), data, columns, title, names, width=_WIDTH, height=_HEIGHT)


def bar_chart(
    rows: Rows,
    category: Column,
    value: Column,
    title: str,
    *,
    series: Column | None = None,
    reference: Reference | None = None,
) -> Chart:
    """One horizontal bar from zero for each category, its value beside it; with ``series`` one for each of them."""
    columns = [category, *([series] if series else []), value]
    data = tidy(rows, columns, title)
    groups = series or category
    names = values_of(data, groups)
    y_axis = _name_axis(category, data)
    x_axis = _quantity(alt.X, value, data)
    bars = alt.Chart().mark_bar(cornerRadiusEnd=1.5).encode(y_axis, x_axis, tooltip=style.tooltip_of(columns))
    right_end = f"isValid(datum.{value.key}) ? max(0, datum.{value.key}) : null"
    texts = alt.Chart().mark_text(align="left", dx=5).transform_calculate(right_end=right_end)
    texts = texts.encode(y_axis, alt.X("right_end:Q", title=value.heading), text=style.text_of(value))
    if series:
        offset = alt.YOffset(field=series.key, type="nominal", sort=None)
        bars, texts = bars.encode(offset, style.color_of(series, names, symbol="square")), texts.encode(offset)
    layers = [bars, texts]
    if reference:
        layers += _reference_layers(reference, value, groups, data, channel="x")
    height = 26 * len(data) + 12 * len(values_of(data, category))
    return _finish(alt.layer(*layers), data, columns, title, names, width=_WIDTH, height=height)


def dot_interval_chart(
    rows: Rows,
    name: Column,
    estimate: Column,
    interval: tuple[str, str],
    title: str,
    *,
    reference: Reference | None = None,
) -> Chart:
    """One estimate for each name: a dot, and a line between the two columns that ``interval`` names."""
    ends = _interval_columns(estimate, interval)
    columns = [name, estimate, *ends]
    data = tidy(rows, columns, title)
    names = values_of(data, name)
    y_axis = _name_axis(name, data)
    values = numbers_of(data, columns[1:]) + _reference_values(reference)
    x_axis = _quantity(alt.X, estimate, data, scale=style.scale_of(values, padding=12))
    low, high = alt.X(field=ends[0].key, type="quantitative", title=estimate.heading), alt.X2(field=ends[1].key)
    color = style.color_of(name, names)
    spans = alt.Chart().mark_rule(strokeWidth=2.5).encode(y_axis, low, high, color)
    dots = alt.Chart().mark_point(filled=True, size=110, opacity=1.0)
    dots = dots.encode(y_axis, x_axis, color, style.shape_of(name, names), tooltip=style.tooltip_of(columns))
    layers = _reference_layers(reference, estimate, name, data, channel="x") if reference else []
    chart = alt.layer(*layers, spans, dots)
    return _finish(chart, data, columns, title, names, width=_WIDTH, height=20 + 34 * len(names))


def histogram(
    rows: Rows,
    low: Column,
    high: str,
    share: Column,
    series: Column,
    title: str,
    *,
    reference: Reference | None = None,
) -> Chart:
    """Bins that were counted before, as one outline for each series; a row is the bin from ``low`` to ``high``.

    ``low``'s title names the horizontal axis; ``high`` is the key of the other edge.
    """
    edge = dataclasses.replace(low, key=high, title=f"{low.title}, to")
    columns = [series, dataclasses.replace(low, title=f"{low.title}, from"), edge, share]
    data = tidy(rows, columns, title)
    names = values_of(data, series)
    x_axis = _quantity(alt.X, low, data)
    y_axis = _quantity(alt.Y, share, data)
    bars = alt.Chart().mark_rect(opacity=0.18)
    bars = bars.encode(x_axis, y_axis, alt.X2(field=edge.key), alt.Y2(datum=0), style.color_of(series, names))
    bars = bars.encode(tooltip=style.tooltip_of(columns))
    steps = alt.Chart(alt.InlineData(values=_outline(data, low, edge, share, series)))
    steps = steps.mark_line(interpolate="step-after").encode(x_axis, y_axis, style.dash_of(series, names))
    steps = steps.encode(style.color_of(series, names, symbol="stroke"))
    layers = [bars, steps]
    if reference:
        layers += _reference_layers(reference, low, series, data, channel="x")
    return _finish(alt.layer(*layers), data, columns, title, names, width=_WIDTH, height=_HEIGHT)


def heat_map(
    rows: Rows,
    x: Column,
    y: Column,
    value: Column,
    title: str,
    *,
    panel: Column | None = None,
    floor: Reference | None = None,
    end: float | None = None,
) -> Chart:
    """A grid of cells coloured by value, one for each value of ``panel``, all on one colour scale.

    The scale starts at zero, at the smallest value where that is negative, or at the ``floor`` (one number): what
    does not exceed its floor looks alike. It ends at the largest value, or at ``end``. A cell without a finite value
    stays empty.
    """
    columns = [*([panel] if panel else []), y, x, value]
    data = tidy(rows, columns, title)
    values = numbers_of(data, [value])
    heading, start = value.heading, min([0.0, *values])
    if floor:
        if isinstance(floor.value, Mapping):
            raise ValueError(f"{title!r}: a heat map has one colour scale, so its floor is one number, not several")
        start = floor.value
        heading = f"{value.heading}, from {floor.label} ({value.text(start)})"
    end = max([start, *values]) if end is None else end
    scale = alt.Scale(domain=[start, end if end > start else start + 1], clamp=True, nice=False)
    legend = alt.Legend(title=heading, gradientLength=200, gradientThickness=8, **style.scale_format(value))
    num_x, num_y = len(values_of(data, x)), len(values_of(data, y))
    panels = values_of(data, panel) if panel else [""]
    num_columns = max(1, min(len(panels), 3, _WIDTH // (8 * num_x + 40)))
    width = num_x * max(1, min(40, (_WIDTH // num_columns - 40) // num_x))  # whole pixels leave no seams
    height = num_y * max(6, min(26, 220 // num_y))
    cells = alt.Chart(width=width, height=height).mark_rect()
    places = [(alt.X, x, alt.Scale(domain=values_of(data, x))), (alt.Y, y, alt.Scale(domain=values_of(data, y)))]
    cells = cells.encode(
        *(
            channel(field=one.key, type="ordinal", title=one.heading, sort=None, scale=names, axis=style.CELL_AXIS)
            for channel, one, names in places
        ),
        alt.Color(field=value.key, type="quantitative", scale=scale, legend=legend),
        tooltip=style.tooltip_of(columns),
    )
    if panel:
        facet = alt.Facet(field=panel.key, type="nominal", sort=panels, title=None)
        cells = cells.facet(facet, columns=num_columns, data=alt.InlineData(values=data))
    return _finish(cells, data, columns, title, panels)


def data_table(spec: Mapping[str, Any]) -> Table:
    """The rows that a chart of this module draws, as a table; ``spec`` is the chart's ``to_dict()``."""
    columns = [Column(**column) for column in spec["usermeta"]["columns"]]
    return Table(columns, spec["datasets"][spec["data"]["name"]])


def save_chart(chart: Chart, stem: Path) -> list[Path]:
    """Write ``stem.svg``, ``stem.pdf`` and ``stem.png`` (at twice the size) and return their paths."""
    spec = _without_hover(chart.to_dict())
    drawings = {
        ".svg": vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE_VERSION, allowed_base_urls=[]),
        ".pdf": vl_convert.vegalite_to_pdf(spec, vl_version=VEGA_LITE_VERSION, allowed_base_urls=[]),
        ".png": vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE_VERSION, allowed_base_urls=[], scale=2),
    }
    paths = []
    for suffix, drawing in drawings.items():
        path = stem.with_name(stem.name + suffix)
        write_atomically(path, drawing)
        paths.append(path)
    return paths


def _interval_columns(middle: Column, keys: tuple[str, str]) -> list[Column]:
    return [
        dataclasses.replace(middle, key=key, title=f"{middle.title}, {end}")
        for key, end in zip(keys, ("low", "high"), strict=True)
    ]


def _quantity(channel: type, column: Column, data: Rows, **options: Any) -> Any:
    """An encoding of numbers on ``alt.X`` or ``alt.Y``."""
    options = {"title": column.heading, "axis": style.axis_of(column, numbers_of(data, [column]))} | options
    return channel(field=column.key, type="quantitative", **options)


def _log_ticks(column: Column, values: Sequence[float], is_log: bool) -> dict[str, alt.Axis]:
    """The axis of an encoding on a logarithmic scale; empty on a linear one and around a single value."""
    if not is_log or len(set(values)) == 1:
        return {}
    return {"axis": alt.Axis(values=style.log_ticks(values), **style.scale_format(column))}


def _name_axis(column: Column, data: Rows) -> alt.Y:
    """Names from top to bottom in the order of the rows; a name without a value keeps its place."""
    scale = alt.Scale(domain=values_of(data, column))
    return alt.Y(field=column.key, type="nominal", title=None, sort=None, scale=scale, axis=style.NAME_AXIS)


def _outline(data: Rows, low: Column, high: Column, share: Column, series: Column) -> list[dict[str, Any]]:
    """The corners of each series' steps, closed at the right edge of the last bin."""
    corners = []
    for name in values_of(data, series):
        bins = sorted((row for row in data if row[series.key] == name), key=lambda row: row[low.key])
        corners += [{series.key: name, low.key: row[low.key], share.key: row[share.key]} for row in bins]
        corners.append({series.key: name, low.key: bins[-1][high.key], share.key: bins[-1][share.key]})
    return corners


def _reference_values(reference: Reference | None) -> list[float]:
    if reference is None:
        return []
    return list(reference.value.values()) if isinstance(reference.value, Mapping) else [reference.value]


def _reference_layers(
    reference: Reference, column: Column, series: Column, data: Rows, channel: Literal["x", "y"]
) -> list[alt.Chart]:
    """A rule across the chart at each reference value, and its label at the end of the rule.

    The label of a horizontal rule is on the side where fewer values are.
    """
    names = values_of(data, series)
    if isinstance(reference.value, Mapping):
        if unknown := set(reference.value) - set(names):
            raise ValueError(
                f"{reference.label!r} names {sorted(unknown)}, but the series are {', '.join(map(str, names))}"
            )
        values = [(f"{reference.label}, {name}", value, name) for name, value in reference.value.items()]
        color = [style.color_of(series, names)]
    else:
        values, color = [(reference.label, reference.value, None)], []
    rows = [
        {column.key: value, "reference": f"{label}: {column.text(value)}", series.key: name}
        for label, value, name in values
    ]
    base = alt.Chart(alt.InlineData(values=rows)).encode(*color)
    text = alt.Text(field="reference", type="nominal")
    if channel == "x":
        base = base.encode(alt.X(field=column.key, type="quantitative", title=column.heading))
        place, align, under = {"y": alt.value(0)}, "center", False
    else:
        base = base.encode(alt.Y(field=column.key, type="quantitative", title=column.heading))
        place, align = {"x": alt.value("width")}, "right"
        under = median(numbers_of(data, [column]) or [0]) > median(value for _, value, _ in values)
    rule = base.mark_rule(strokeWidth=1.2, strokeDash=[3, 3])
    baseline, shift = ("top", 5) if under else ("bottom", -4)
    labels = [base.mark_text(align=align, baseline=baseline, dy=shift, style=look) for look in ("halo", "text")]
    return [rule, *(label.encode(text, **place) for label in labels)]


def _finish(
    chart: Chart, data: Rows, columns: Sequence[Column], title: str, names: Sequence[object], **size: int
) -> Chart:
    """Add what every chart has: its rows, the columns of their table, its title, its size and the style."""
    if isinstance(chart, alt.LayerChart):
        chart = chart.resolve_legend(color="independent", strokeDash="independent", shape="independent")
    entry_width = style.legend_entry_width(names)
    config = style.chart_config(style.PAPER)
    config["legend"]["columns"] = max(1, _WIDTH // entry_width)
    chart = chart.properties(
        data=alt.InlineData(values=data),
        title=title,
        usermeta={
            "columns": [dataclasses.asdict(column) for column in columns],
            "legend_entry_width": entry_width,
        },
        **size,
    )
    return chart.configure(**config)


def _without_hover(spec: dict[str, Any]) -> dict[str, Any]:
    """The same chart without the points that only a pointer makes visible."""
    if "layer" not in spec:
        return spec
    layers = [layer for layer in spec["layer"] if layer.get("name") != "hover"]
    params = [param for param in spec.get("params", []) if param["name"] != "hover"]
    return spec | {"layer": layers, "params": params}

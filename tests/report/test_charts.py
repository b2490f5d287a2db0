from __future__ import annotations

import importlib.resources
import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from example_page import ARM, ARMS, FLOOR, LAYER, LOSS, SHARE, STEP, every_chart, head_rows, layer_rows, loss_rows

from gatelab.report import style
from gatelab.report.charts import (
    Reference,
    bar_chart,
    data_table,
    dot_interval_chart,
    heat_map,
    histogram,
    line_chart,
    save_chart,
)
from gatelab.report.tables import Column

HEAD = Column("head", "Head", "d")


def layers_with(spec: dict[str, Any], mark: str) -> list[dict[str, Any]]:
    return [layer for layer in spec["layer"] if layer["mark"]["type"] == mark]


def data_of(spec: dict[str, Any], layer: dict[str, Any]) -> list[dict[str, Any]]:
    return spec["datasets"][layer["data"]["name"]]


def svg_of(chart: Any, folder: Path) -> ElementTree.Element:
    return ElementTree.fromstring(save_chart(chart, folder / "chart")[0].read_text())


def texts(svg: ElementTree.Element) -> list[str]:
    return ["".join(element.itertext()) for element in svg.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("number", range(6))
def test_every_chart_is_valid_and_carries_its_data(number: int) -> None:
    spec = every_chart()[number].to_dict()  # Altair checks it against Vega-Lite's schema
    json.dumps(spec, allow_nan=False)
    table = data_table(spec)
    assert len(table.rows) == (180, 15, 45, 12, 3, 3)[number]
    assert "–" not in {cell for row in table.cells() for cell in row}
    assert [column.heading for column in table.columns] == (
        ["Arm", "Step", "Loss (nats)"],
        ["Arm", "Layer", "First-token attention", "First-token attention, low", "First-token attention, high"],
        ["Arm", "Layer", "Head", "First-token attention"],
        ["Arm", "Gate score, from", "Gate score, to", "Share of scores"],
        ["Arm", "Difference", "Difference, low", "Difference, high"],
        ["Arm", "Speed (tokens/s)"],
    )[number]


def test_a_chart_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="'Loss' has nothing to draw: it was given no rows"):
        line_chart([], STEP, LOSS, ARM, "Loss")


def test_a_missing_column_is_named() -> None:
    rows = [*loss_rows(), {"arm": "ungated", "step": 3}]
    with pytest.raises(ValueError, match="'Loss': a row has no column 'loss'; it has arm, step"):
        line_chart(rows, STEP, LOSS, ARM, "Loss")


def test_a_key_that_is_no_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'Loss': column key 'a\.b' is no name"):
        line_chart([{"a.b": 1, "arm": "a", "loss": 2.0}], Column("a.b", "Step"), LOSS, ARM, "Loss")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_logarithmic_axis_needs_positive_values(value: float) -> None:
    rows = [{"arm": "ungated", "step": 1, "loss": value}]
    with pytest.raises(
        ValueError, match="'Loss' has a logarithmic axis, but the values of 'loss' are not all positive"
    ):
        line_chart(rows, STEP, LOSS, ARM, "Loss", log_y=True)


def test_both_axes_can_be_logarithmic(tmp_path: Path) -> None:
    rows = [{"arm": "a", "rate": 10.0**-n, "loss": 2.0 + n} for n in range(4)]
    rate = Column("rate", "rate", "g")
    written = texts(svg_of(line_chart(rows, rate, LOSS, ARM, "Loss", log_x=True, log_y=True), tmp_path))
    assert {"0.001", "0.01", "0.1", "1"} <= set(written[: written.index("rate")])
    with pytest.raises(ValueError, match="logarithmic axis, but the values of 'rate' are not all positive"):
        line_chart([{"arm": "a", "rate": 0.0, "loss": 1.0}], rate, LOSS, ARM, "Loss", log_x=True)


def test_a_number_that_is_not_finite_is_named_in_the_data() -> None:
    rows = [
        {"arm": "a", "step": step, "loss": loss} for step, loss in enumerate([1.5, math.nan, math.inf, -math.inf, None])
    ]
    spec = line_chart(rows, STEP, LOSS, ARM, "Loss").to_dict()
    json.dumps(spec, allow_nan=False)
    assert [cells[-1] for cells in data_table(spec).cells()] == ["1.500", "NaN", "inf", "-inf", "–"]


def test_a_line_breaks_where_a_number_is_not_finite(tmp_path: Path) -> None:
    rows = [{"arm": "a", "step": step, "loss": math.inf if step == 3 else 2.0 + step} for step in range(7)]
    svg = svg_of(line_chart(rows, STEP, LOSS, ARM, "Loss"), tmp_path)
    paths = [element.get("d", "") for element in svg.iter() if element.get("aria-roledescription") == "line mark"]
    assert [path.count("M") for path in paths] == [2]
    assert "8.0" in texts(svg) or "8" in texts(svg)  # the axis spans the finite values


@pytest.mark.parametrize("log_y", [False, True])
def test_a_constant_is_labelled_with_its_value(tmp_path: Path, log_y: bool) -> None:
    rows = [{"arm": "a", "step": step, "loss": 0.3} for step in range(3)]
    written = texts(svg_of(line_chart(rows, STEP, LOSS, ARM, "Loss", log_y=log_y), tmp_path))
    assert {"0.27", "0.30", "0.33"} <= {text[:4] for text in written}


def test_whole_numbers_have_no_ticks_between_them(tmp_path: Path) -> None:
    rows = [{"arm": "a", "layer": layer, "share": 0.1 + layer / 10} for layer in range(3)]
    written = texts(svg_of(line_chart(rows, LAYER, SHARE, ARM, "By layer"), tmp_path))
    assert written[: written.index("Layer")] == ["0", "1", "2"]


def test_a_logarithmic_axis_has_readable_ticks() -> None:
    assert style.log_ticks([3.0, 40.0]) == [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0]
    assert style.log_ticks([1030.0, 1114.4]) == [1030.0, 1070.0, 1110.0], "an axis without numbers says nothing"
    assert style.log_ticks([0.002, 40.0]) == pytest.approx([1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0])


def test_the_series_differ_without_colour_too() -> None:
    names = [f"arm_{number:02}" for number in range(30)]
    spec = line_chart(loss_rows(tuple(names), 3), STEP, LOSS, ARM, "Loss").to_dict()
    encoding = layers_with(spec, "line")[0]["encoding"]
    dashes = encoding["strokeDash"]["scale"]["range"]
    colors = spec["config"]["range"]["category"]
    assert encoding["color"]["scale"]["domain"] == encoding["strokeDash"]["scale"]["domain"] == names
    assert len({str(dash) for dash in dashes[:6]}) == 6
    assert len({(colors[number % len(colors)], str(dashes[number])) for number in range(30)}) == 30
    shapes = layers_with(spec, "point")[0]["encoding"]["shape"]["scale"]["range"]
    assert len(set(shapes[:6])) == 6
    assert all(left != right for left, right in pairwise(dashes))


def test_series_colours_stand_out_from_paper() -> None:
    def luminance(color: str) -> float:
        channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for color in style.PAPER.series:
        assert 1.05 / (luminance(color) + 0.05) > 2, color


def test_the_page_uses_the_colours_of_the_paper() -> None:
    css = importlib.resources.files("gatelab.report").joinpath("page.css").read_text()
    light = css[: css.index("prefers-color-scheme: dark")]
    colors = dict(re.findall(r"--([\w-]+): (#\w+);", light))
    paper = style.PAPER
    assert tuple(colors[f"series-{number}"] for number in range(1, 8)) == paper.series
    assert (colors["text"], colors["muted"], colors["line"], colors["background"]) == (
        paper.text,
        paper.muted,
        paper.grid,
        paper.background,
    )


def test_a_floor_is_a_labelled_dashed_rule(tmp_path: Path) -> None:
    chart = line_chart(layer_rows(), LAYER, SHARE, ARM, "By layer", reference=FLOOR)
    rule = layers_with(chart.to_dict(), "rule")[0]
    assert data_of(chart.to_dict(), rule)[0]["share"] == 0.0133
    svg = svg_of(chart, tmp_path)
    assert "uniform attention: 0.0133" in texts(svg)
    rules = [element for element in svg.iter() if element.get("stroke-dasharray") == "3,3"]
    assert len(rules) == 1


def test_floors_can_differ_by_series() -> None:
    floors = Reference("uniform attention", {"ungated": 0.0133, "headwise": 0.0239})
    spec = line_chart(layer_rows(), LAYER, SHARE, ARM, "By layer", reference=floors).to_dict()
    rule = layers_with(spec, "rule")[0]
    assert rule["encoding"]["color"]["field"] == "arm"
    assert data_of(spec, rule) == [
        {"arm": "ungated", "share": 0.0133, "reference": "uniform attention, ungated: 0.0133"},
        {"arm": "headwise", "share": 0.0239, "reference": "uniform attention, headwise: 0.0239"},
    ]


def test_a_floor_of_an_unknown_series_is_refused() -> None:
    message = r"'uniform attention' names \['gated'\], but the series are ungated, headwise, elementwise"
    with pytest.raises(ValueError, match=message):
        line_chart(
            layer_rows(), LAYER, SHARE, ARM, "By layer", reference=Reference("uniform attention", {"gated": 0.1})
        )


@pytest.mark.parametrize(("floor", "side"), [(0.001, "top"), (0.9, "bottom")])
def test_a_floors_label_stands_where_fewer_values_are(floor: float, side: str) -> None:
    spec = line_chart(layer_rows(), LAYER, SHARE, ARM, "By layer", reference=Reference("floor", floor)).to_dict()
    assert {layer["mark"]["baseline"] for layer in layers_with(spec, "text")} == {side}


def test_panels_share_one_colour_scale_that_starts_at_the_floor() -> None:
    rows = head_rows()
    spec = heat_map(rows, HEAD, LAYER, SHARE, "By head", panel=ARM, floor=FLOOR).to_dict()
    color = spec["spec"]["encoding"]["color"]
    assert color["scale"]["domain"] == [0.0133, max(row["share"] for row in rows)]
    assert color["scale"]["clamp"] is True
    assert color["legend"]["title"] == "First-token attention, from uniform attention (0.0133)"
    assert spec["facet"]["sort"] == list(ARMS)


def test_a_colour_scale_starts_at_zero_or_at_the_smallest_negative_value() -> None:
    def domain(shares: list[float]) -> list[float]:
        rows = [{"layer": 0, "head": head, "share": share} for head, share in enumerate(shares)]
        return heat_map(rows, HEAD, LAYER, SHARE, "By head").to_dict()["encoding"]["color"]["scale"]["domain"]

    assert domain([0.2, 0.5, math.nan]) == [0.0, 0.5]
    assert domain([-0.3, 0.5]) == [-0.3, 0.5]
    assert domain([math.nan]) == domain([0.0, 0.0]) == [0.0, 1.0]


def test_a_heat_map_may_end_where_its_scale_does() -> None:
    spec = heat_map(head_rows(), HEAD, LAYER, SHARE, "By head", end=7.5).to_dict()
    assert spec["encoding"]["color"]["scale"]["domain"] == [0, 7.5]


def test_a_heat_map_takes_one_floor() -> None:
    floors = Reference("uniform attention", {"ungated": 0.0133})
    with pytest.raises(ValueError, match="'By head': a heat map has one colour scale, so its floor is one number"):
        heat_map(head_rows(), HEAD, LAYER, SHARE, "By head", panel=ARM, floor=floors)


def test_a_large_heat_map_has_cells_of_whole_pixels() -> None:
    rows = [{"layer": layer, "head": head, "share": 0.1} for layer in range(64) for head in range(64)]
    spec = heat_map(rows, HEAD, LAYER, SHARE, "By head").to_dict()
    assert (spec["width"] % 64, spec["height"] % 64) == (0, 0)
    assert 64 <= spec["width"] <= 620


def test_a_histograms_outline_ends_at_its_last_edge() -> None:
    rows = [
        {"arm": "a", "low": 0.5, "high": 0.9, "share": 0.7},  # not in order
        {"arm": "a", "low": 0.1, "high": 0.5, "share": 0.3},
    ]
    spec = histogram(
        rows, Column("low", "Score", ".1f"), "high", Column("share", "Share", ".0%"), ARM, "Gates"
    ).to_dict()
    outline = data_of(spec, layers_with(spec, "line")[0])
    assert [(row["low"], row["share"]) for row in outline] == [(0.1, 0.3), (0.5, 0.7), (0.9, 0.7)]


def test_bars_of_a_series_stand_beside_each_other(tmp_path: Path) -> None:
    rows = [{"arm": arm, "mode": mode, "speed": 100.0 + len(arm + mode)} for arm in ARMS for mode in ("eager", "fast")]
    chart = bar_chart(rows, ARM, Column("speed", "Speed", ".1f"), "Speed", series=Column("mode", "Mode"))
    written = texts(svg_of(chart, tmp_path))
    assert [text for text in written if re.fullmatch(r"1\d\d\.\d", text)] == [f"{row['speed']:.1f}" for row in rows]
    assert {"eager", "fast", *ARMS} <= set(written)


def test_a_bar_without_a_value_keeps_its_place_and_a_negative_one_its_label(tmp_path: Path) -> None:
    rows = [{"arm": "a", "speed": -3.0}, {"arm": "b", "speed": 2.0}, {"arm": "c", "speed": None}]
    svg = svg_of(bar_chart(rows, ARM, Column("speed", "Speed", ".2f"), "Speed"), tmp_path)
    assert {"a", "b", "c", "−3.00", "2.00"} <= set(texts(svg))
    assert sum(element.get("aria-roledescription") == "bar" for element in svg.iter()) == 2


def test_an_interval_is_drawn_between_its_columns() -> None:
    rows = [{"arm": "headwise", "d": -0.1, "low": -0.2, "high": 0.3}]
    zero = Reference("no difference", 0.0)
    spec = dot_interval_chart(
        rows, ARM, Column("d", "Difference", ".1f"), ("low", "high"), "D", reference=zero
    ).to_dict()
    span = next(layer for layer in layers_with(spec, "rule") if "x2" in layer["encoding"])
    assert (span["encoding"]["x"]["field"], span["encoding"]["x2"]["field"]) == ("low", "high")
    assert data_table(spec).cells() == [["headwise", "-0.1", "-0.2", "0.3"]]


def test_a_chart_is_written_as_svg_pdf_and_png(tmp_path: Path) -> None:
    paths = save_chart(line_chart(loss_rows(), STEP, LOSS, ARM, "Training loss"), tmp_path / "figures" / "loss.curve")
    assert [path.name for path in paths] == ["loss.curve.svg", "loss.curve.pdf", "loss.curve.png"]
    assert sorted(paths) == sorted((tmp_path / "figures").iterdir())
    svg, pdf, png = (path.read_bytes() for path in paths)
    assert {"Training loss", "Step", "Loss (nats)", *ARMS} <= set(texts(ElementTree.fromstring(svg)))
    assert pdf.startswith(b"%PDF") and b"/FontFile" in pdf  # the font is embedded
    assert png.startswith(b"\x89PNG") and int.from_bytes(png[16:20]) > 1200  # twice the drawn width


def test_a_written_chart_leaves_the_points_under_the_pointer_out(tmp_path: Path) -> None:
    def num_points(num_steps: int) -> int:
        svg = svg_of(line_chart(loss_rows(("a",), num_steps), STEP, LOSS, ARM, "Loss"), tmp_path)
        return sum(element.get("aria-roledescription") == "point" for element in svg.iter())

    assert (num_points(40), num_points(41)) == (40, 0)


def test_the_same_rows_give_the_same_chart() -> None:
    first, second = ([chart.to_dict() for chart in every_chart()] for _ in range(2))
    assert first == second


def test_a_written_chart_shows_hostile_names_as_text(tmp_path: Path) -> None:
    name = "</text><script>alert(1)</script>"
    chart = line_chart(loss_rows((name, "b")), STEP, LOSS, ARM, name)
    svg = svg_of(chart, tmp_path)
    assert name in texts(svg)
    assert not [element for element in svg.iter() if element.tag.endswith("script")]

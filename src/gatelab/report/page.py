"""One report page: a single HTML file that needs no network, with the command that redoes it.

Every name and number on a page is text: Jinja escapes what stands in HTML, and charts and their data are JSON in
which ``<`` is written ``\\u003c``. A content security policy lets only the two scripts of the page run, by their
hashes, and nothing reach the network.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import jinja2
import vl_convert

from gatelab.files import write_atomically
from gatelab.report.charts import VEGA_LITE_VERSION, Chart, data_table
from gatelab.report.style import Colors, chart_config
from gatelab.report.tables import Column, Linked, Table

_PAGE_COLORS = Colors(
    text="var(--text)",
    muted="var(--muted)",
    grid="var(--line)",
    background="var(--background)",
    series=tuple(f"var(--series-{number})" for number in range(1, 8)),
)
_MOST_ROWS_SHOWN = 200


@dataclass(frozen=True)
class Figure:
    """A chart with what a reader needs under it.

    ``caption`` says what is seen, ``definition`` how the figure is computed, ``context`` under which conditions it was
    measured (T, samples, token policy, floor).
    """

    chart: Chart
    caption: str
    definition: str = ""
    context: str = ""


@dataclass(frozen=True)
class Section:
    """A titled part of a page: paragraphs (separated by an empty line), then figures and tables in reading order."""

    title: str
    text: str = ""
    content: Sequence[Figure | Table] = ()


@dataclass(frozen=True)
class Page:
    """A report: what was found (``lead``), the command that redoes it, and where and how it was made."""

    title: str
    lead: str
    command: str
    sections: Sequence[Section]
    environment: Mapping[str, object] = field(default_factory=dict)
    notes: Sequence[str] = ()


def write_page(page: Page, path: Path) -> None:
    """Write the page as one HTML file; if that fails, ``path`` keeps what it had."""
    write_atomically(path, render(page))


def render(page: Page) -> str:
    """The page as HTML text."""
    figure_numbers, table_numbers = count(1), count(1)
    sections, specs = [], []
    for section in page.sections:
        content = []
        for item in section.content:
            if isinstance(item, Table):
                content.append(_table_view(item) | {"number": next(table_numbers)})
            else:
                spec = item.chart.to_dict()
                content.append(_figure_view(item, spec) | {"number": next(figure_numbers), "chart": len(specs)})
                specs.append(_page_spec(spec, item))
        sections.append({"title": section.title, "paragraphs": _paragraphs(section.text), "content": content})
    scripts = [_chart_library(), _asset("page.js")]
    return _template().render(
        page=page,
        lead=_paragraphs(page.lead),
        sections=sections,
        stylesheet=_asset("page.css"),
        scripts=scripts,
        script_hashes=[_hash(script) for script in scripts],
        specs=_json_in_html(specs),
    )


def _figure_view(figure: Figure, spec: Mapping[str, Any]) -> dict[str, Any]:
    """What the template needs to know of a figure; its data are shown up to a number of rows."""
    data = data_table(spec)
    shown = dataclasses.replace(data, rows=data.rows[:_MOST_ROWS_SHOWN])
    return {"figure": figure, "title": spec["title"], "data": _table_view(shown), "num_rows": len(data.rows)}


def _table_view(table: Table) -> dict[str, Any]:
    rows = [[_cell_view(column, row.get(column.key)) for column in table.columns] for row in table.rows]
    return {"table": table, "rows": rows}


def _cell_view(column: Column, value: object) -> dict[str, str]:
    if isinstance(value, Linked):
        return _cell_view(column, value.value) | {"href": value.href}
    return {"text": _page_text(column, value)}


def _page_text(column: Column, value: object) -> str:
    """A cell's text, with the mathematical minus sign in numbers."""
    text = column.text(value)
    return text if isinstance(value, str) else text.replace("-", "−")


def _page_spec(spec: Mapping[str, Any], figure: Figure) -> dict[str, Any]:
    """The chart as the page draws it: in the page's colours and width, its title left to the page."""
    spec = {key: value for key, value in spec.items() if key not in ("$schema", "title")} | {
        "description": figure.caption,
        "config": chart_config(_PAGE_COLORS, font="system-ui, sans-serif"),
    }
    return spec | {"width": "container"} if "layer" in spec else spec


def _paragraphs(text: str) -> list[str]:
    return [paragraph for paragraph in text.strip().split("\n\n") if paragraph]


def _json_in_html(value: object) -> str:
    """JSON that no text in it can end early: HTML looks for ``<`` only."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _hash(script: str) -> str:
    """The script's hash as a content security policy writes it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


@cache
def _chart_library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script."""
    library = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", VEGA_LITE_VERSION)
    assert "</script" not in library.lower() and "\r" not in library
    return library


def _asset(name: str) -> str:
    return importlib.resources.files("gatelab.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_asset("page.html.jinja"))

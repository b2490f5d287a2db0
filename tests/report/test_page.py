from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from example_page import ARM, LOSS, STEP, example_page, loss_rows

from chromium import OpenedPage
from gatelab.report.charts import line_chart
from gatelab.report.page import Figure, Page, Section, render, write_page
from gatelab.report.tables import Column, Table

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "\"'`{{7*7}}${alert(3)}",
    "\u202egnihtemos\u202c",
)
NUM_CHARTS = 6
CLIPPED_TEXTS = """[...document.querySelectorAll('.chart svg text')].filter((text) => {
  const inner = text.getBoundingClientRect(), outer = text.closest('.chart').getBoundingClientRect();
  return inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.top < outer.top - 1;
}).map((text) => text.textContent)"""


class Document(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def plain_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "page.html"
    write_page(example_page(), path)
    return path


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "page.html"
    write_page(example_page(HOSTILE, "".join(HOSTILE)), path)
    return path


def test_the_page_refers_to_nothing_outside_itself(plain_page: Path) -> None:
    document = Document(plain_page.read_text())
    addresses = [a[key] for _, a in document.elements for key in ("src", "href", "action", "data") if key in a]
    assert all(address == "data:," or str(address).startswith("#") for address in addresses)
    specs = document.scripts[0]
    assert "http:" not in specs and "https:" not in specs


def test_the_policy_lets_only_the_pages_own_scripts_run(plain_page: Path) -> None:
    document = Document(plain_page.read_text())
    policy = next(str(a["content"]) for a in document.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    directives = {name: sources for name, *sources in (part.split() for part in policy.split(";"))}
    assert directives["default-src"] == ["'none'"]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in document.scripts[1:]]
    assert directives["script-src"] == [f"'sha256-{value}'" for value in hashes]
    assert set(directives) == {"default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"}


def test_the_contents_lead_to_every_section(plain_page: Path) -> None:
    document = Document(plain_page.read_text())
    sections = [f"#{a['id']}" for a in document.all("section")]
    assert [a["href"] for a in document.all("a")] == sections == ["#section-1", "#section-2", "#environment", "#notes"]
    ids = [a["id"] for _, a in document.elements if "id" in a]
    assert len(ids) == len(set(ids))


def test_figures_carry_caption_definition_context_and_data(plain_page: Path) -> None:
    html = plain_page.read_text()
    for text in (
        "gatelab study demo train.steps=60",
        "<b>Table 1.</b> Results",
        "<b>Figure 1.</b> Caption 0",
        "<b>Figure 6.</b> Caption 5",
        "<dt>Definition</dt><dd>How it is computed</dd>",
        "<dt>Context</dt><dd>T = 512</dd>",
        "Data of this figure, 180 rows",
        '<td class="right">13.200</td>',
        "[−0.140, −0.050]",
    ):
        assert text in html, text


def test_a_long_table_of_data_is_cut_and_says_so() -> None:
    figure = Figure(line_chart(loss_rows(("a",), 1234), STEP, LOSS, ARM, "Loss"), "Loss")
    html = render(Page("Title", "Lead", "command", [Section("Loss", content=[figure])]))
    assert "Data of this figure, 1,234 rows" in html
    assert "The first 200 rows are shown." in html
    assert html.split("<script")[0].count("<tr>") == 201


def test_parts_that_are_not_given_leave_no_trace() -> None:
    html = render(Page("Title", "Lead", "command", [Section("Empty")]))
    assert "environment" not in html.split("<body>")[1].split("<script")[0].lower()
    assert ">Notes<" not in html
    assert json.loads(Document(html).scripts[0]) == []


def test_minus_signs_in_numbers_alone_are_set_as_such() -> None:
    table = Table([Column("name", "Name"), Column("d", "D", ".1f")], [{"name": "head-wise", "d": -0.5}])
    html = render(Page("Title", "Lead", "command", [Section("Section", content=[table])]))
    assert '<td class="left">head-wise</td><td class="right">−0.5</td>' in html


def test_a_page_is_a_pure_function_of_its_content() -> None:
    assert render(example_page()) == render(example_page())


def test_hostile_text_opens_no_element(plain_page: Path, hostile_page: Path) -> None:
    plain, hostile = Document(plain_page.read_text()), Document(hostile_page.read_text())
    assert {tag for tag, _ in hostile.elements} == {tag for tag, _ in plain.elements}
    assert len(hostile.scripts) == len(plain.scripts) == 3
    assert hostile.scripts[1:] == plain.scripts[1:]
    assert json.loads(hostile.scripts[0])[0]["datasets"]


def test_a_failed_page_leaves_the_old_file(tmp_path: Path) -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    path = tmp_path / "page.html"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="no text"):
        write_page(Page("Title", "Lead", "command", [], environment={"torch": Unprintable()}), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def assert_all_is_drawn(page: OpenedPage) -> None:
    assert page.evaluate("document.documentElement.dataset.drawn") == str(NUM_CHARTS)
    assert (
        page.evaluate("[...document.querySelectorAll('.chart')].filter(c => c.querySelector('svg path')).length") == 6
    )
    assert page.console_errors == []
    assert page.requests == []
    assert page.dialogs == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_the_page_is_drawn_offline(
    plain_page: Path, open_page: Callable[..., OpenedPage], width: int, dark: bool
) -> None:
    page = open_page(plain_page, width=width, dark=dark)
    assert_all_is_drawn(page)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.evaluate(CLIPPED_TEXTS) == []
    background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert background == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")


def test_charts_follow_the_colour_scheme(plain_page: Path, open_page: Callable[..., OpenedPage]) -> None:
    page = open_page(plain_page)
    color = "getComputedStyle(document.querySelector('.chart svg .mark-line path')).stroke"
    assert page.evaluate(color) == "rgb(0, 114, 178)"
    page.call("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
    assert page.evaluate(color) == "rgb(74, 168, 224)"


def test_hostile_text_is_shown_as_text(hostile_page: Path, open_page: Callable[..., OpenedPage]) -> None:
    page = open_page(hostile_page)
    assert_all_is_drawn(page)
    assert page.evaluate("document.querySelectorAll('script').length") == 3
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    suffix = "".join(HOSTILE)
    assert page.evaluate("document.title") == f"Three arms{suffix}"
    for selector in ("h1", ".lead", ".command code", "nav a", "h2", "h3", "figcaption", "th", "td", "dt", "dd", "li"):
        shown = page.evaluate(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)")
        assert any(text.strip().endswith(suffix) or text in HOSTILE for text in shown), selector
    drawn = page.evaluate("[...document.querySelectorAll('.chart svg text')].map(e => e.textContent)")
    for name in HOSTILE:
        assert name in drawn, name  # in legends, axes and panels
    assert any(text.startswith("Difference</script><script>alert(1)") for text in drawn)


@pytest.mark.parametrize("chart", range(NUM_CHARTS))
def test_a_tooltip_shows_the_values_as_text(
    hostile_page: Path, open_page: Callable[..., OpenedPage], chart: int
) -> None:
    page = open_page(hostile_page)
    place = page.evaluate(
        "(() => {"
        f"const chart = document.querySelectorAll('.chart')[{chart}];"
        "chart.scrollIntoView({ block: 'center', behavior: 'instant' });"
        "const marks = '.mark-symbol[role=graphics-object] path, .mark-rect[role=graphics-object] path';"
        "const box = [...chart.querySelectorAll(marks)].at(-1).getBoundingClientRect();"
        "return [box.left + box.width / 2, box.top + box.height / 2]; })()"
    )
    page.move_pointer(place[0] - 1, place[1])
    page.move_pointer(*place)
    page.wait_until("document.querySelector('#vg-tooltip-element.visible') !== null")
    rows = page.evaluate("[...document.querySelectorAll('#vg-tooltip-element tr')].map(r => r.textContent)")
    assert any(row == f"Arm{name}" for row in rows for name in HOSTILE), rows
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert (page.dialogs, page.console_errors, page.requests) == ([], [], [])


def test_all_data_can_be_saved_as_csv(hostile_page: Path, open_page: Callable[..., OpenedPage]) -> None:
    page = open_page(hostile_page)
    page.evaluate("URL.createObjectURL = (blob) => { window.saved = blob; return '#'; }, 0")
    page.evaluate("HTMLAnchorElement.prototype.click = () => {}, 0")
    page.evaluate("document.querySelector('button').click()")
    lines = page.evaluate("window.saved.text()").split("\r\n")
    assert lines[0] == '"arm","step","loss"'
    assert lines[1] == '"</script><script>alert(1)</script>","0","13.200000000000001"'
    assert lines[121].startswith('"""\'`{{7*7}}${alert(3)}","0",')
    assert len(lines) == 1 + 4 * 60 + 1

"""The page of one or two models: what stands on it, and that a real browser draws all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from result_rows import CONTEXT, made_up_result, probe_rows

from chromium import OpenedPage
from gatelab.diagnose.page import diagnosis_page, verdict_table
from gatelab.diagnose.results import NamedResult
from gatelab.report.page import Figure, Page, render, write_page
from gatelab.report.tables import Table

HOSTILE = "</script><script>alert(1)</script>"
HOSTILE_TOKEN = "<img src=x onerror=alert(2)>"
SECTIONS = [
    "Verdict",
    "First-token attention",
    "Where attention goes",
    "Hidden states",
    "Gates",
    "Rank",
    "Entropy and distance",
    "Probes",
    "Context",
]
NUM_BY_SECTION = {
    "First-token attention": 3,
    "Where attention goes": 2,
    "Hidden states": 4,
    "Gates": 4,
    "Rank": 3,
    "Entropy and distance": 3,
    "Probes": 3,
}


def with_probes(result: NamedResult, num_layers: int = 5) -> NamedResult:
    return replace(result, rows=[*result.rows, *probe_rows(num_layers)])


def figures(page: Page) -> list[Figure]:
    return [item for section in page.sections for item in section.content if isinstance(item, Figure)]


def drawn_rows(page: Page, title: str) -> list[dict]:
    specs = [figure.chart.to_dict() for figure in figures(page)]
    (spec,) = [spec for spec in specs if spec["title"] == title]
    return spec["datasets"][spec["data"]["name"]]


def test_every_section_and_figure_is_there_with_definition_and_context() -> None:
    page = diagnosis_page([with_probes(made_up_result())], "gatelab diagnose model")
    assert [section.title for section in page.sections] == SECTIONS
    for section in page.sections:
        shown = [item for item in section.content if isinstance(item, Figure)]
        assert len(shown) == NUM_BY_SECTION.get(section.title, 0), section.title
    for figure in figures(page):
        assert figure.caption and figure.definition
        for part in ("T = 4,096", "4 samples", "16,384 tokens", "BOS: one", "no padding", "float32", "torch 2.13.0"):
            assert part in figure.context
    assert page.command == "gatelab diagnose model"
    assert page.lead.startswith("Sink: yes, ")


def test_what_was_not_measured_leaves_no_trace() -> None:
    core = made_up_result(gates=False)
    names = {"first_token_attention", "largest_activation", "median_activation"}
    page = diagnosis_page([replace(core, rows=[row for row in core.rows if row["metric"] in names])], "command")
    assert [section.title for section in page.sections] == [
        "Verdict",
        "First-token attention",
        "Hidden states",
        "Context",
    ]
    assert "gate" not in " ".join(cells[0] for cells in verdict_table([core]).cells())


def test_two_models_share_layers_heads_and_colours() -> None:
    results = [made_up_result("small", num_layers=3, num_heads=2, gates=False), made_up_result("large", num_layers=7)]
    page = diagnosis_page(results, "command")
    cells = drawn_rows(page, "Every head")
    assert {(row["layer"], row["head"]) for row in cells if row["panel"] == "small"} == {
        (layer, head) for layer in range(7) for head in range(3)
    }
    missing = [row for row in cells if row["value"] is None]
    assert {row["panel"] for row in missing} == {"small"} and len(missing) == 7 * 3 - 3 * 2
    (gates,) = [one for one in figures(page) if one.chart.to_dict()["title"] == "Gates at sdpa_output, by layer"]
    series = next(one for one in gates.chart.to_dict()["usermeta"]["columns"] if one["key"] == "series")
    assert series["names"] == ["small", "large"]  # so that the gated model is drawn in its own colour


def test_floors_that_differ_from_layer_to_layer_are_lines_of_their_own() -> None:
    result = made_up_result()
    rows = [
        {**row, "floor": row["floor"] * (1 + row["layer"] % 2)} if row["metric"] == "first_token_attention" else row
        for row in result.rows
    ]
    drawn = drawn_rows(diagnosis_page([replace(result, rows=rows)], "command"), "By layer")
    assert [row["series"] for row in drawn] == ["model"] * 5 + ["uniform attention"] * 5


def test_the_model_without_gates_has_no_second_line_after_the_gate() -> None:
    gated, plain = made_up_result("gated"), made_up_result("plain")
    renamed = {"output_magnitude": "gated_output_magnitude", "output_effective_rank": "gated_output_effective_rank"}
    same = [row for row in plain.rows if row["metric"] not in renamed.values()]
    same += [{**row, "metric": renamed[row["metric"]]} for row in same if row["metric"] in renamed]
    page = diagnosis_page([gated, replace(plain, rows=same)], "command")
    names = {row["series"] for row in drawn_rows(page, "Attention output before and after the gate")}
    assert names == {"gated, before", "plain, before", "gated, after"}


def test_layers_without_softmax_attention_are_named() -> None:
    context = {**CONTEXT, "skipped_layers": {0: "linear_attention layer", 2: "linear_attention layer"}}
    page = diagnosis_page([replace(made_up_result("hybrid"), context=context)], "command")
    table = page.sections[0].content[1]
    assert isinstance(table, Table)
    assert table.cells() == [["hybrid", "0", "linear_attention layer"], ["hybrid", "2", "linear_attention layer"]]


def test_contexts_that_differ_are_said_under_each_name() -> None:
    other = replace(made_up_result("other"), context={**CONTEXT, "bos": "none", "dtype": "bfloat16"})
    context = figures(diagnosis_page([made_up_result("one"), other], "command"))[0].context
    assert context.startswith("T = 4,096; 4 samples; 16,384 tokens; no padding; torch 2.13.0. one: BOS: one in front")
    assert context.endswith("other: BOS: none; bfloat16")


@pytest.mark.parametrize("names", [(), ("a", "a"), ("a", "b", "c")])
def test_other_numbers_of_models_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="a page shows one model, or two of different names, not"):
        diagnosis_page([made_up_result(name) for name in names], "command")


def test_a_page_is_a_pure_function_of_its_rows() -> None:
    pages = [render(diagnosis_page([made_up_result(), made_up_result("other")], "command")) for _ in range(2)]
    assert pages[0] == pages[1]


def assert_all_is_drawn(page: OpenedPage, num_charts: int) -> None:
    assert page.evaluate("document.documentElement.dataset.drawn") == str(num_charts)
    drawn = "[...document.querySelectorAll('.chart')].filter(c => c.querySelector('svg path')).length"
    assert page.evaluate(drawn) == num_charts
    assert (page.console_errors, page.requests, page.dialogs) == ([], [], [])
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_one_model_in_a_browser(tmp_path: Path, open_page: Callable[..., OpenedPage], width: int, dark: bool) -> None:
    page = diagnosis_page([with_probes(made_up_result())], "command")
    write_page(page, tmp_path / "page.html")
    assert_all_is_drawn(open_page(tmp_path / "page.html", width=width, dark=dark), len(figures(page)))


def test_two_models_of_64_heads_in_a_browser(tmp_path: Path, open_page: Callable[..., OpenedPage]) -> None:
    results = [
        made_up_result("ungated", num_layers=48, num_heads=64, gates=False),
        made_up_result("gated", num_layers=64, num_heads=64, sink=0.02),
    ]
    page = diagnosis_page(results, "command")
    write_page(page, tmp_path / "page.html")
    opened = open_page(tmp_path / "page.html")
    assert_all_is_drawn(opened, len(figures(page)))
    boxes = opened.evaluate(
        "[...document.querySelectorAll('.chart')[0].querySelectorAll('.mark-rect path')].slice(0, 4096)"
        ".map(p => p.getBoundingClientRect()).map(b => [b.width, b.height])"
    )
    assert len(boxes) == 4096
    assert all(width >= 6 and height >= 5 for width, height in boxes)


def test_hostile_names_and_tokens_are_text(tmp_path: Path, open_page: Callable[..., OpenedPage]) -> None:
    results = [made_up_result(HOSTILE, delimiters=(HOSTILE_TOKEN,)), made_up_result("other")]
    context = {**CONTEXT, "bos": HOSTILE_TOKEN, HOSTILE_TOKEN: HOSTILE, "skipped_layers": {0: HOSTILE}}
    results[0] = replace(results[0], context=context)
    page = diagnosis_page(results, f"gatelab diagnose '{HOSTILE}'")
    write_page(page, tmp_path / "page.html")
    opened = open_page(tmp_path / "page.html")
    assert_all_is_drawn(opened, len(figures(page)))
    assert opened.evaluate("document.querySelectorAll('script').length") == 3
    assert opened.evaluate("document.querySelectorAll('img').length") == 0
    assert opened.evaluate("document.title") == f"Diagnosis of {HOSTILE} and other"
    texts = opened.evaluate("[...document.querySelectorAll('.chart svg text')].map(e => e.textContent)")
    assert HOSTILE in texts
    assert any(HOSTILE_TOKEN in text or text.startswith('delimiter "<img') for text in texts)

from __future__ import annotations

import io
import math
import re

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from gatelab.report.tables import MISSING, Column, Linked, Table, to_markdown, to_terminal, transposed


def printed(table: Table, width: int = 100) -> str:
    output = io.StringIO()
    Console(file=output, width=width, force_terminal=True, color_system="truecolor", _environ={}).print(
        to_terminal(table)
    )
    return output.getvalue()


@pytest.mark.parametrize(
    ("value", "format", "text"),
    [
        (1.23456, ".3f", "1.235"),
        (1234567, ",d", "1,234,567"),
        (0.0421, "+.1%", "+4.2%"),
        (7, "", "7"),
        (None, ".3f", "–"),
        (math.nan, ".3f", "NaN"),
        (math.inf, ",d", "inf"),
        (-math.inf, ".1%", "-inf"),
        (True, ".3f", "yes"),
        (False, "", "no"),
        ((-0.14, 0.05), ".2f", "[-0.14, 0.05]"),
        ((math.nan, 1.0), ".1f", "[NaN, 1.0]"),
        ("elementwise", ".3f", "elementwise"),
    ],
)
def test_a_cell_is_written_in_its_columns_format(value: object, format: str, text: str) -> None:
    assert Column("key", "Title", format).text(value) == text


def test_a_format_that_no_number_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"column 'loss': '\.3q' is no format for numbers; write one like \.3f or ,d"):
        Column("loss", "Loss", ".3q")


def test_numbers_are_set_right_and_the_unit_stands_in_the_heading() -> None:
    assert [Column("a", "A").align, Column("b", "B", ".1f").align, Column("c", "C", align="right").align] == [
        "left",
        "right",
        "right",
    ]
    assert Column("loss", "Loss", unit="nats").heading == "Loss (nats)"
    assert Column("loss", "Loss").heading == "Loss"


def test_an_absent_key_counts_as_missing() -> None:
    assert Table([Column("a", "A"), Column("b", "B")], [{"a": "x"}]).cells() == [["x", "–"]]


def test_the_terminal_table_shows_every_cell() -> None:
    table = Table([Column("arm", "Arm"), Column("loss", "Loss", ".3f")], [{"arm": "headwise", "loss": 4.5}], "Results")
    lines = printed(table).splitlines()
    assert "Results" in lines[0]
    assert any("headwise" in line and "4.500" in line for line in lines)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_table_wider_than_the_terminal_goes_on_below(width: int) -> None:
    columns = [Column("arm", "arm"), *(Column(f"n{n}", f"quantity {n}", ",d") for n in range(8))]
    rows = [{"arm": arm, **{f"n{n}": 1_000_000 * seed + n for n in range(8)}} for seed, arm in ((1, "a"), (2, "gated"))]
    text = printed(Table(columns, rows, "caption"), width)
    assert max(len(line) for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()) <= width
    for row in rows:
        assert all(text.count(f"{row[f'n{n}']:,d}") == 1 for n in range(8))
    assert text.count("caption") == 1
    assert text.count("gated") == {40: 4, 60: 2, 80: 2, 200: 1}[width]


def test_a_name_can_not_drive_the_terminal() -> None:
    hostile = "[red]a[/red]\x1b]0;title\x07\x9b31m\u202egnp\n"
    text = printed(Table([Column("arm", hostile)], [{"arm": hostile}], hostile))
    assert text.count("[red]a[/red]") == 3
    assert not any(sign in text for sign in ("\x1b]", "\x07", "\x9b", "\u202e"))


def test_markdown_is_a_github_table() -> None:
    table = Table([Column("arm", "Arm"), Column("loss", "Loss", ".2f", unit="nats")], [{"arm": "a", "loss": -4.5}, {}])
    assert to_markdown(table) == "| Arm | Loss (nats) |\n| :--- | ---: |\n| a | -4.50 |\n| – | – |\n"


@pytest.mark.parametrize(
    "name",
    [
        "a|b",
        "a\\|b",
        "<script>alert(1)</script>",
        "[click](javascript:alert(1))",
        "`code` *bold* _emphasis_ ~~gone~~",
        "sdpa_elementwise",
    ],
)
def test_markdown_shows_a_name_as_it_is(name: str) -> None:
    markdown = to_markdown(Table([Column("arm", "Arm"), Column("loss", "Loss")], [{"arm": name, "loss": 1}], "About"))
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown)
    cells = [token.children for token in tokens if token.type == "inline"]
    assert ["".join(part.content for part in cell or []) for cell in cells] == ["About", "Arm", "Loss", name, "1"]
    assert {part.type for cell in cells for part in cell or []} == {"text"}


def test_markdown_keeps_a_row_on_one_line() -> None:
    assert to_markdown(Table([Column("a", "A")], [{"a": "two\nlines"}])).splitlines()[-1] == "| two lines |"
    assert "sdpa_elementwise" in to_markdown(Table([Column("a", "A")], [{"a": "sdpa_elementwise"}]))


def test_transposed_has_a_row_for_each_column_and_the_same_cells():
    columns = [Column("arm", "arm"), Column("loss", "loss", ".2f", "nats"), Column("gate", "gate", ".1%")]
    table = Table(
        columns, [{"arm": "a", "loss": 1.0, "gate": None}, {"arm": "b", "loss": 2.5, "gate": 0.125}], "caption"
    )
    turned = transposed(table, "figure")
    assert [column.heading for column in turned.columns] == ["figure", "a", "b"]
    assert turned.cells() == [["loss (nats)", "1.00", "2.50"], ["gate", MISSING, "12.5%"]]
    assert turned.caption == "caption"


def test_a_linked_value_is_a_link_where_there_can_be_one() -> None:
    column = Column("loss", "loss", ".2f")
    table = Table([column], [{"loss": Linked(1.234, "arm b/re|sult.json")}, {"loss": Linked(None, "x")}])
    assert table.cells() == [["1.23"], [MISSING]]
    assert "| [1.23](./arm%20b/re%7Csult.json) |" in to_markdown(table) and "1.23" in printed(table)


@pytest.mark.parametrize("path", ["javascript:alert(1)", "http://host/x", 'a"onclick=b', "//host/x"])
def test_a_link_is_a_relative_path_whatever_its_name(path: str) -> None:
    href = Linked(1, path).href
    assert href.startswith("./") and not set(href) & set('":<> ')

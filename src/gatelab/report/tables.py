"""One table definition, printed in a terminal, on a report page and in Markdown.

Cells are plain values. ``None`` is a value that does not exist and prints as an en dash; a number that is not finite
prints as ``NaN``, ``inf`` or ``-inf``; a pair of numbers prints as an interval. :class:`Linked` names the file that
holds a value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import rich.console
import rich.table
from rich.console import RenderResult
from rich.text import Text

MISSING = "–"

# C0 and C1 controls start escape sequences in a terminal; the bidirectional ones reorder the text around them.
_UNSAFE_IN_TERMINAL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_MARKDOWN_SIGNS = re.compile(r"[\\|`*\[\]<>~]|(?<!\w)_|_(?!\w)")


class Linked(NamedTuple):
    """A value, and the file that holds it as a path relative to the page or Markdown file that shows it."""

    value: object
    path: str

    @property
    def href(self) -> str:
        """The path as a link: quoted, so that no name of a folder can make it anything but a relative path."""
        return f"./{quote(self.path)}"


@dataclass(frozen=True)
class Column:
    """A column of tidy rows: its key in each row, its name for readers, and how its numbers are written.

    ``format`` is Python's format specification for numbers (``.3f``, ``,d``, ``.1%``); text is written as it is. A
    column with a format is set right and one without left, unless ``align`` says otherwise. ``names`` fixes the order,
    and so the colours, of a column that separates series, for charts that show only some of them. Raises
    ``ValueError`` for a format that no number has.
    """

    key: str
    title: str
    format: str = ""
    unit: str = ""
    align: Literal["left", "right"] | None = None
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        try:
            format(0, self.format)
        except ValueError:
            raise ValueError(
                f"column {self.key!r}: {self.format!r} is no format for numbers; write one like .3f or ,d"
            ) from None
        if self.align is None:
            object.__setattr__(self, "align", "right" if self.format else "left")

    @property
    def heading(self) -> str:
        """The title with its unit in brackets."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def text(self, value: object) -> str:
        """One cell as text."""
        match value:
            case Linked():
                return self.text(value.value)
            case None:
                return MISSING
            case bool():
                return "yes" if value else "no"
            case int() | float():
                return self._number(value)
            case (int() | float() as low, int() | float() as high):
                return f"[{self._number(low)}, {self._number(high)}]"
            case _:
                return str(value)

    def _number(self, value: float) -> str:
        if not math.isfinite(value):
            return "NaN" if math.isnan(value) else str(value)
        return format(value, self.format)


@dataclass(frozen=True)
class Table:
    """Columns, and rows that hold a value under each column's key (an absent key counts as ``None``)."""

    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    caption: str = ""

    def cells(self) -> list[list[str]]:
        """The text of each cell, row by row."""
        return [[column.text(row.get(column.key)) for column in self.columns] for row in self.rows]


@dataclass(frozen=True)
class TerminalTable:
    """A table as rich prints it. One that is wider than the terminal goes on below, its first column repeated.

    No number is ever broken; long texts are. No cell can style the terminal.
    """

    table: Table

    def __rich_console__(self, console: rich.console.Console, options: rich.console.ConsoleOptions) -> RenderResult:
        first, *others = ([column.heading, *cells] for column, cells in self._columns())
        caption = self.table.caption
        for part in self._parts(options.max_width):
            view = rich.table.Table(title=_terminal_text(caption) if caption else None, title_justify="left")
            view.add_column(_terminal_text(first[0]), justify=self.table.columns[0].align or "left", no_wrap=True)
            for number in part:
                justify = self.table.columns[number + 1].align or "left"
                view.add_column(_terminal_text(others[number][0]), justify=justify, overflow="fold")
            for row in zip(first[1:], *(others[number][1:] for number in part), strict=True):
                view.add_row(*map(_terminal_text, row))
            yield view
            caption = ""

    def _columns(self) -> list[tuple[Column, list[str]]]:
        cells = self.table.cells()
        return [(column, [row[number] for row in cells]) for number, column in enumerate(self.table.columns)]

    def _parts(self, width: int) -> list[list[int]]:
        """The columns after the first that fit side by side, part by part."""
        first, *others = (_least_width(column, cells) + _FRAME for column, cells in self._columns())
        parts: list[list[int]] = [[]]
        left = width - first - 1
        for number, needed in enumerate(others):
            if parts[-1] and needed > left:
                parts.append([])
                left = width - first - 1
            parts[-1].append(number)
            left -= needed
        return parts


_FRAME = 3
_BREAKABLE = 24


def _least_width(column: Column, cells: Sequence[str]) -> int:
    """Signs that a column needs: its longest word or cell, of long texts no more than 24."""
    words = column.heading.split()
    return max(
        map(len, [*words, *(cell if len(cell) <= _BREAKABLE else cell[:_BREAKABLE] for cell in cells)]), default=0
    )


def to_terminal(table: Table) -> TerminalTable:
    """The table for ``console.print``."""
    return TerminalTable(table)


def transposed(table: Table, heading: str) -> Table:
    """The same cells with a row for each column: many figures of a few things, readable in a narrow terminal."""
    first, *figures = table.columns
    columns = [
        Column("heading", heading),
        *(Column(str(n), first.text(row.get(first.key)), align="right") for n, row in enumerate(table.rows)),
    ]
    rows = [
        {"heading": column.heading, **{str(n): column.text(row.get(column.key)) for n, row in enumerate(table.rows)}}
        for column in figures
    ]
    return Table(columns, rows, table.caption)


def to_markdown(table: Table) -> str:
    """The table as GitHub Markdown, with every sign of Markdown or HTML in a text escaped."""
    lines = [
        [markdown_text(column.heading) for column in table.columns],
        ["---:" if column.align == "right" else ":---" for column in table.columns],
    ]
    for row in table.rows:
        lines.append([_markdown_cell(column, row.get(column.key)) for column in table.columns])
    body = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{markdown_text(table.caption)}\n\n{body}" if table.caption else body


def _markdown_cell(column: Column, value: object) -> str:
    if isinstance(value, Linked):
        return f"[{_markdown_cell(column, value.value)}]({value.href})"
    return markdown_text(value) if isinstance(value, str) else column.text(value)


def _terminal_text(text: str) -> Text:
    return Text(safe_for_terminal(text))


def safe_for_terminal(text: str) -> str:
    """The text with each control character replaced, so that a name from a file can't drive the terminal."""
    return _UNSAFE_IN_TERMINAL.sub("\ufffd", text)


def markdown_text(text: str) -> str:
    """The text on one line, with every sign of Markdown or HTML in it escaped."""
    return _MARKDOWN_SIGNS.sub(r"\\\g<0>", " ".join(text.split()))

"""Tidy rows: a list of dicts, one observation each, checked and made fit for a chart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gatelab.report.tables import Column

Rows = Sequence[Mapping[str, Any]]


def tidy(rows: Rows, columns: Sequence[Column], title: str) -> list[dict[str, Any]]:
    """The columns' values of every row, with a number that JSON can't hold replaced by its name.

    Raises ``ValueError`` for no rows, a missing column, or a column key that is no identifier.
    """
    if not rows:
        raise ValueError(f"{title!r} has nothing to draw: it was given no rows")
    for column in columns:
        if not column.key.isidentifier():
            raise ValueError(f"{title!r}: column key {column.key!r} is no name; use letters, digits and underscores")
        if missing := [row for row in rows if column.key not in row]:
            raise ValueError(f"{title!r}: a row has no column {column.key!r}; it has {', '.join(map(str, missing[0]))}")
    return [{column.key: _drawable(row[column.key], column) for column in columns} for row in rows]


def values_of(data: Rows, column: Column) -> list[Any]:
    """The different values of a column in the order of their appearance."""
    return list(dict.fromkeys(row[column.key] for row in data))


def numbers_of(data: Rows, columns: Sequence[Column]) -> list[float]:
    """The finite values of some columns of tidy rows."""
    return [row[column.key] for column in columns for row in data if isinstance(row[column.key], int | float)]


def _drawable(value: Any, column: Column) -> Any:
    return column.text(value) if isinstance(value, float) and not math.isfinite(value) else value

"""A goal beside what was measured: met where the whole 95 % interval is on its side, missed where none of it is."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gatelab.report.tables import Column, Table

_HOLDS = {"at most": operator.le, "at least": operator.ge}


def goal(
    name: str, found: Mapping[str, float], relation: Literal["at most", "at least"], bound: float
) -> dict[str, Any]:
    """A goal as a row; ``found`` has ``value``, ``low`` and ``high``, all equal for a single measurement."""
    holds = {_HOLDS[relation](found[end], bound) for end in ("low", "high")}
    outcome = "open" if len(holds) > 1 else "met" if holds.pop() else "missed"
    return {"name": name, "relation": relation, "bound": bound, **found, "outcome": outcome}


def goals_table(goals: Sequence[Mapping[str, Any]]) -> Table:
    """Each goal, what was found, and whether it is met."""
    columns = [Column("name", "goal"), Column("aim", "aim"), Column("found", "found"), Column("outcome", "outcome")]
    rows = [
        {
            "name": row["name"],
            "aim": f"{row['relation']} {row['bound']:g}",
            "found": interval_text(row, ".3g"),
            "outcome": row["outcome"],
        }
        for row in goals
    ]
    return Table(columns, rows, "Medians with 95 % intervals; open where the interval holds the bound.")


def goals_text(goals: Sequence[Mapping[str, Any]], separator: str) -> str:
    """What was found for each goal and whether that meets it, as text."""
    return separator.join(f"{row['name']}: {interval_text(row, '.3g')} ({row['outcome']})" for row in goals)


def interval_text(found: Mapping[str, float], spec: str) -> str:
    """A value and its interval, or the value alone where it was measured once."""
    value, low, high = (format(found[name], spec) for name in ("value", "low", "high"))
    return value if found["low"] == found["high"] else f"{value} [{low}, {high}]"

"""What runs that start from weights had before their first step and after their last, as a section of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gatelab.report.page import Section
from gatelab.report.tables import Column, Table
from gatelab.study.findings import LOSS, OVER_FLOOR, Findings, Quantity, mean_over_seeds
from gatelab.study.report_tables import Cells, estimate_cells, mean_cell
from gatelab.study.run_curves import RunCurve
from gatelab.study.statistics import Estimate

TITLE = "Before and after"
_TEXT = (
    "Each run starts from weights. Both figures of a run are of the same held-out windows, those that are measured on "
    "the way; a loss is that of their validation part. These are estimates and no verdicts: each interval misses the "
    "true value in 1 of 20 studies."
)


class Movement(NamedTuple):
    """A figure of an arm before the first step and after the last, and how far it moved; 95 % t intervals over seeds.

    ``beyond_baseline`` is the movement less the baseline's, paired by seed; ``None`` for the baseline, and where the
    two have no seed in common.
    """

    arm: str
    before: Estimate | None
    after: Estimate | None
    movement: Estimate | None
    beyond_baseline: Estimate | None


def movements(findings: Findings, curves: Sequence[RunCurve]) -> dict[Quantity, list[Movement]]:
    """The movement of every figure that is measured on the way, over finished runs; none for runs from fresh weights.

    A run that was measured just once, and one that diverged, is left out.
    """
    study = findings.study
    if all(study.settings_of(arm).train.start_from is None for arm in study.arms):
        return {}
    finished = {(one.arm, one.seed) for runs in findings.compared.values() for one in runs if one.diverged_at is None}
    whole = [one for one in curves if (one.arm, one.seed) in finished]
    known = {one: _ends(one, whole) for one in findings.quantities if not one.key.endswith(OVER_FLOOR)}
    return {
        one: [_movement(arm.name, ends, study.baseline) for arm in study.arms] for one, ends in known.items() if ends
    }


def start_section(moved: Mapping[Quantity, Sequence[Movement]], baseline: str) -> Section:
    """A table for each figure; empty without any."""
    return Section(TITLE, _TEXT, [_table(quantity, of_arms, baseline) for quantity, of_arms in moved.items()])


def _ends(quantity: Quantity, curves: Sequence[RunCurve]) -> dict[str, dict[int, tuple[float, float]]]:
    """By arm and seed, the figure at step 0 and at the last step."""
    ends: dict[str, dict[int, tuple[float, float]]] = {}
    for curve in curves:
        rows, key = (curve.evaluations, "loss") if quantity.key == LOSS else (curve.measurements, quantity.key)
        values = {row["step"]: row[key] for row in rows if row.get(key) is not None}
        if 0 in values and len(values) > 1:
            ends.setdefault(curve.arm, {})[curve.seed] = (values[0], values[max(values)])
    return ends


def _movement(arm: str, ends: Mapping[str, Mapping[int, tuple[float, float]]], baseline: str) -> Movement:
    own, base = ends.get(arm, {}), ends.get(baseline, {})
    moved = {seed: after - before for seed, (before, after) in own.items()}
    beyond = (
        [] if arm == baseline else [moved[seed] - (base[seed][1] - base[seed][0]) for seed in moved if seed in base]
    )
    before, after = ([pair[end] for pair in own.values()] for end in (0, 1))
    return Movement(arm, *map(mean_over_seeds, (before, after, list(moved.values()), beyond)))


def _table(quantity: Quantity, of_arms: Sequence[Movement], baseline: str) -> Table:
    signed = f"+{quantity.format}"
    columns = [
        Column("arm", "arm"),
        Column("before", "before", align="right"),
        Column("after", "after", align="right"),
        Column("movement", "after less before", signed),
        Column("movement_interval", "95 %", signed),
        Column("beyond_baseline", f"less {baseline}'s", signed),
        Column("beyond_baseline_interval", "95 %", signed),
    ]
    rows: list[Cells] = [
        {
            "arm": one.arm,
            "before": mean_cell(one.before, quantity.format),
            "after": mean_cell(one.after, quantity.format),
            **estimate_cells("movement", one.movement),
            **estimate_cells("beyond_baseline", one.beyond_baseline),
        }
        for one in of_arms
    ]
    title = f"{quantity.title[0].upper()}{quantity.title[1:]}"
    caption = f"{title}, mean over seeds. Intervals: Student's t, paired by seed."
    return Table(columns, rows, caption)

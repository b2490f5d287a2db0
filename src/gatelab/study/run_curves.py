"""Curves of a study's runs, thinned on reading, as means over seeds with a band from the least to the greatest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from gatelab.study.jobs import Job
from gatelab.train.metrics import SPIKE_FIRST_STEP, count_spikes, read_metrics
from gatelab.train.run_folder import RunFolder

Row = dict[str, Any]
_MOST_POINTS = 80


class RunCurve(NamedTuple):
    """One run: medians of the training loss in up to 80 equal parts of it, what was evaluated and measured, spikes
    (``None`` for a run too short to count any), and the events: steps that were not finite and were passed over."""

    arm: str
    seed: int
    training: list[Row]
    evaluations: list[Row]
    measurements: list[Row]
    loss_spikes: int | None
    events: list[Row]


def read_curve(job: Job, study_folder: Path) -> RunCurve:
    """The curve of a run that was begun; evaluations are those of the first held-out domain."""
    run = RunFolder(study_folder / job.folder)
    rows, result = read_metrics(run.metrics), run.result
    steps, evaluations, measurements, events = (
        [row for row in rows if row["kind"] == kind] for kind in ("step", "evaluation", "measurement", "event")
    )
    domain = evaluations[0].get("domain") if evaluations else None
    spikes = _spikes(steps) if result is None else result["loss_spikes"]
    is_countable = job.settings.train.steps > SPIKE_FIRST_STEP
    return RunCurve(
        job.arm,
        job.seed,
        _thinned(steps, job.settings.train.steps),
        [row for row in evaluations if row.get("domain") == domain],
        measurements,
        spikes if is_countable else None,
        events,
    )


def bands(curves: Sequence[RunCurve], rows_of: Callable[[RunCurve], Sequence[Row]], key: str) -> list[Row]:
    """Mean, least and greatest value over the seeds that have it, by arm and step; in the order of the arms."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for curve in curves:
        for row in rows_of(curve):
            if row.get(key) is not None:
                found[curve.arm, row["step"]].append(row[key])
    return [
        {"arm": arm, "step": step, "value": mean(values), "low": min(values), "high": max(values)}
        for (arm, step), values in found.items()
    ]


def _spikes(rows: Sequence[Row]) -> int:
    return count_spikes([row["step"] for row in rows], [row["loss"] for row in rows]) if rows else 0


def _thinned(rows: Sequence[Row], num_steps: int) -> list[Row]:
    """The median loss of each part, at its last step; a part that is not finished is left out."""
    num_parts = min(_MOST_POINTS, num_steps)
    parts: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        parts[(row["step"] - 1) * num_parts // num_steps].append(row["loss"])
    ends = {part: -(-(part + 1) * num_steps // num_parts) for part in parts}
    last = rows[-1]["step"] if rows else 0
    return [{"step": ends[part], "loss": median(losses)} for part, losses in parts.items() if ends[part] <= last]

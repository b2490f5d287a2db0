"""The results of ``benchmarks/long_context_study.py`` as tables and one page of charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from gatelab.report.charts import line_chart
from gatelab.report.page import Figure, Page, Section
from gatelab.report.tables import Column, Table
from gatelab.study.presets.arms import uniform_floor
from gatelab.study.statistics import Estimate, t_interval

Stage = dict[str, Any]

EXPLORATORY = (
    "Means over seeds with 95 % t intervals of the seeds, differences paired with the ungated arm of the same seed; "
    "exploratory, so none is a verdict."
)

ARM, STAGE = Column("arm", "arm"), Column("stage", "stage")
STAGE_NAMES = {
    "trained": "trained at 512",
    "extended": "trained on at 2,048",
    "yarn": "stretched to 8,192",
}
BASELINE = "ungated"
UNWINDOWED = slice(1, None)
"""The layers that see the whole context: all but the first."""
PAPER = (
    ("ungated, 32k", 88.89, 85.88, 83.15, 79.50, None, None),
    ("gated, 32k", 90.56, 87.11, 84.61, 79.77, None, None),
    ("ungated, YaRN", 82.90, 71.52, 61.23, 37.94, 37.51, 31.65),
    ("gated, YaRN", 88.13, 80.01, 76.74, 72.88, 66.60, 58.82),
)


def over_seeds(rows: Sequence[Stage], arm: str, stage: str, figure: Callable[[Stage], float | None]) -> list[float]:
    """The figure of each finished seed, in order of the seeds; none where one of them lacks it."""
    found = [figure(row) for row in rows if (row["arm"], row["stage"]) == (arm, stage)]
    return [] if any(value is None for value in found) else [value for value in found if value is not None]


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and interval; ``None`` without two seeds."""
    return t_interval(np.array(values)) if len(values) > 1 else None


def mini_score(task: str, length: int) -> Callable[[Stage], float | None]:
    """Score of one mini task at one length, in percent."""

    def figure(row: Stage) -> float | None:
        found = (cell["score"] for cell in row["mini"] if (cell["task"], cell["length"]) == (task, length))
        return next(found, None)

    return figure


def bucket_of(key: str, start: int) -> Callable[[Stage], float | None]:
    """The figure of one bucket of positions."""
    return lambda row: next((bucket["nats"] for bucket in row[key] if bucket["start"] == start), None)


def mini_table(rows: Sequence[Stage], stage: str) -> Table:
    """Mini needles after a stage, by task, arm and length, with the paired difference from the ungated arm."""
    of_stage = [row for row in rows if row["stage"] == stage]
    lengths = sorted({cell["length"] for row in of_stage for cell in row["mini"]})
    tasks = list(dict.fromkeys(cell["task"] for row in of_stage for cell in row["mini"]))
    columns = [Column("task", "task"), ARM, *(Column(str(one), f"{one:,d}", align="right") for one in lengths)]
    cells = []
    for task in tasks:
        base = {length: over_seeds(rows, BASELINE, stage, mini_score(task, length)) for length in lengths}
        for arm in _arms(of_stage):
            scores = {length: over_seeds(rows, arm, stage, mini_score(task, length)) for length in lengths}
            cells.append(
                {"task": task.removeprefix("mini_"), "arm": arm}
                | {str(length): _score_text(scores[length], base[length], arm) for length in lengths}
            )
    seeds = len({row["seed"] for row in of_stage})
    caption = (
        f"{STAGE_NAMES[stage]}: mini needles (not RULER), percent, mean of {seeds} seeds; in brackets the "
        "95 % interval of the difference from ungated."
    )
    return Table(columns, cells, caption)


def mini_tables(rows: Sequence[Stage]) -> list[Table]:
    """A table for each stage that was reached."""
    return [mini_table(rows, stage) for stage in STAGE_NAMES if any(row["stage"] == stage for row in rows)]


def sink_table(rows: Sequence[Stage]) -> Table:
    """Sinks, gates and what the first key is worth, by arm and stage."""
    columns = [
        STAGE,
        ARM,
        Column("first", "first-token attention", ".4f"),
        Column("worst", "worst layer", ".4f"),
        Column("floor", "floor", ".4f"),
        Column("entropy", "entropy", ".3f", "nats"),
        Column("largest", "largest |h|", ".0f"),
        Column("gate", "mean gate", ".3f"),
        Column("masked", "loss with key 0 hidden", align="right"),
    ]
    cells = []
    for stage, name in STAGE_NAMES.items():
        for arm in _arms(rows):
            of = [row for row in rows if (row["arm"], row["stage"]) == (arm, stage)]
            if not of:
                continue
            gates = [mean for row in of for layer in row["gate_means"] for mean in layer.values()]
            cells.append({
                "stage": name,
                "arm": arm,
                "first": fmean(fmean(row["first_token_attention"][UNWINDOWED]) for row in of),
                "worst": fmean(max(row["first_token_attention"][UNWINDOWED]) for row in of),
                "floor": uniform_floor(of[0]["context"]),
                "entropy": fmean(fmean(row["entropy"][UNWINDOWED]) for row in of),
                "largest": max(row["summary"]["largest_activation"] for row in of),
                "gate": fmean(gates) if gates else None,
                "masked": _interval_text(estimate([_mean_of_buckets(row["first_key_masked"]) for row in of]), "+.4f"),
            })  # fmt: skip
    caption = (
        "Means over seeds and layers, of attention without the first layer, which sees four tokens; the last column is "
        "a difference in nats, with its interval."
    )
    return Table(columns, cells, caption)


def paper_table() -> Table:
    """The paper's table 5: RULER of 1.7B models, one run each."""
    lengths = ("4k", "8k", "16k", "32k", "64k", "128k")
    columns = [Column("model", "model"), *(Column(length, length, ".2f") for length in lengths)]
    rows = [dict(zip(("model", *lengths), row, strict=True)) for row in PAPER]
    return Table(columns, rows, "The paper's table 5 (arXiv 2505.06708): RULER, one run each.")


def tables_of(rows: Sequence[Stage]) -> list[Table]:
    """What a terminal shows."""
    return [*mini_tables(rows), sink_table(rows)]


def long_context_page(rows: Sequence[Stage], command: str) -> Page:
    """The report, every figure from ``stages.json``."""
    seeds = len({row["seed"] for row in rows})
    lead = (
        f"Ungated, headwise and elementwise decoders of 2.9 million parameters, matched, {seeds} seeds: trained at 512 "
        "tokens on a quarter text, three quarters retrieval tasks; trained on at 2,048 with rotary base 1e6; stretched "
        "to 8,192 by YaRN without training. What each stage brings, and what it leaves of sinks and gates. Figures: "
        "stages.json."
    )
    return Page(
        title="A longer context, with a gate and without",
        lead=lead,
        command=command,
        sections=[
            Section("Mini needles", EXPLORATORY, [*mini_tables(rows), paper_table()]),
            Section("Loss by position", "State of the Union addresses that were held out.", _loss_figures(rows)),
            Section("Sinks, gates, and the first key", "", [sink_table(rows), *_masked_figures(rows)]),
        ],
    )


def _loss_figures(rows: Sequence[Stage]) -> list[Figure]:
    return [
        _curve(rows, stage, "loss", f"Loss by position, {name}", "Cross-entropy of tokens at these positions.")
        for stage, name in STAGE_NAMES.items()
    ]


def _masked_figures(rows: Sequence[Stage]) -> list[Figure]:
    caption = "What hiding the first key from all later queries adds to the loss."
    return [
        _curve(rows, stage, "first_key_masked", f"First key hidden, {name}", caption)
        for stage, name in STAGE_NAMES.items()
    ]


def _curve(rows: Sequence[Stage], stage: str, key: str, title: str, caption: str) -> Figure:
    starts = sorted({bucket["start"] for row in rows if row["stage"] == stage for bucket in row[key]})
    points = []
    for arm in _arms(rows):
        for start in starts:
            found = estimate(over_seeds(rows, arm, stage, bucket_of(key, start)))
            if found is not None:
                points.append({"arm": arm, "start": start, "nats": found.value, "low": found.low, "high": found.high})
    chart = line_chart(
        points,
        Column("start", "position from", ",d"),
        Column("nats", "loss", ".3f", "nats"),
        Column("arm", "arm", names=_arms(rows)),
        title,
        log_x=True,
        band=("low", "high"),
    )
    return Figure(chart, caption, "Positions in buckets [1, 2), [2, 4), ...", "Bands: 95 % intervals over seeds.")


def _arms(rows: Sequence[Stage]) -> list[str]:
    return list(dict.fromkeys(row["arm"] for row in rows))


def _mean_of_buckets(buckets: Sequence[dict[str, Any]]) -> float:
    return sum(bucket["nats"] * bucket["tokens"] for bucket in buckets) / sum(bucket["tokens"] for bucket in buckets)


def _score_text(scores: Sequence[float], base: Sequence[float], arm: str) -> str | None:
    if not scores:
        return None
    mean = f"{fmean(scores):.1f}"
    if arm == BASELINE or len(base) != len(scores):
        return mean
    found = estimate([one - other for one, other in zip(scores, base, strict=True)])
    return mean if found is None else f"{mean} [{found.low:+.1f}, {found.high:+.1f}]"


def _interval_text(found: Estimate | None, spec: str) -> str | None:
    return None if found is None else f"{found.value:{spec}} [{found.low:{spec}}, {found.high:{spec}}]"

"""The results of ``benchmarks/diagnosis.py`` as one table and one page of charts."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from gatelab.report.charts import bar_chart, line_chart
from gatelab.report.page import Figure, Page, Section
from gatelab.report.tables import Column, Table

Costs = Mapping[str, Any]

MODEL, WAY = Column("model", "model"), Column("way", "way")
_WAYS = {
    "sdpa": "plain forward pass",
    "core": "core set",
    "full": "full set",
    "maps": "output_attentions=True",
}


def ratios(costs: Costs) -> list[dict[str, Any]]:
    """One row for each model and way: median seconds and bytes, and both as multiples of the plain forward pass.

    ``core_is_faster`` and ``core_is_smaller`` compare the core set with the whole maps: seconds taken in turns, and
    bytes over what the process held before.
    """
    plain = {row["model"]: row for row in costs["costs"] if row["way"] == "sdpa"}
    core = {row["model"]: row for row in costs["costs"] if row["way"] == "core"}
    rows = []
    for row in costs["costs"]:
        base, own = plain[row["model"]], median(row["seconds"])
        rows.append({
            "model": row["model"],
            "way": _WAYS[row["way"]],
            "seconds": own,
            "fastest": min(row["seconds"]),
            "slowest": max(row["seconds"]),
            "time_ratio": own / median(base["seconds"]),
            "peak": row["peak"] / 2**20,
            "peak_ratio": row["peak"] / base["peak"],
            "extra": row["extra"] / 2**20,
            "extra_ratio": row["extra"] / base["extra"],
            "core_is_faster": own / median(row["core_seconds"]) if "core_seconds" in row else None,
            "core_is_smaller": row["extra"] / core[row["model"]]["extra"] if "core_seconds" in row else None,
        })  # fmt: skip
    return rows


def cost_table(costs: Costs) -> Table:
    """Time and memory of each way at T = 4,096."""
    columns = [
        MODEL,
        WAY,
        Column("seconds", "median", ".2f", "s"),
        Column("spread", "from, to", ".2f", "s"),
        Column("time_ratio", "time, x plain", ".2f"),
        Column("extra", "memory", ",.0f", "MiB"),
        Column("peak_ratio", "peak, x plain", ".2f"),
    ]
    return Table(columns, [row | {"spread": (row["fastest"], row["slowest"])} for row in ratios(costs)])


def maps_table(costs: Costs) -> Table:
    """The core set against ``output_attentions=True``, in turns."""
    columns = [
        MODEL,
        Column("core_is_faster", "core is faster, times", ".1f"),
        Column("core_is_smaller", "takes less memory, times", ".1f"),
        Column("time_ratio", "maps, x plain pass", ".1f"),
    ]
    rows = [row for row in ratios(costs) if row["core_is_faster"] is not None]
    return Table(columns, rows, "The core set against output_attentions=True. The last column bounds the first.")


def slope_table(costs: Costs) -> Table:
    """Memory by length, with the bytes that each further token takes."""
    shown = [row | {"way": _WAYS[row["way"]], "extra": row["extra"] / 2**20} for row in costs["slope"]]
    for before, row in zip([None, *costs["slope"]], costs["slope"], strict=False):
        if before is not None and before["way"] == row["way"]:
            added = (row["extra"] - before["extra"]) / (row["length"] - before["length"])
            shown[costs["slope"].index(row)]["per_token"] = added / 2**10
    columns = [
        WAY,
        Column("length", "tokens", ",d"),
        Column("extra", "memory over the start", ",.0f", "MiB"),
        Column("per_token", "of each further token", ".1f", "KiB"),
    ]
    return Table(columns, shown)


def cost_page(costs: Costs, command: str) -> Page:
    """All results on one page."""
    rows, slope = ratios(costs), slope_table(costs)
    machine = ", ".join(f"{name} {value}" for name, value in costs["machine"].items())
    rounds = f"T = 4,096, {costs['rounds']} rounds in turns, medians; {machine}"
    longest = max(row["extra"] for row in slope.rows)
    lead = (
        "A diagnosis beside what it replaces: a plain forward pass below it, whole attention maps above it. "
        + " ".join(
            f"{row['model']}: core {row['time_ratio']:.2f}x the time of the plain pass."
            for row in rows
            if row["way"] == "core set"
        )
    )
    time = Figure(
        bar_chart(
            [r for r in rows if r["way"] != _WAYS["maps"]],
            MODEL,
            Column("time_ratio", "time, multiples of the plain forward pass", ".2f"),
            "Time",
            series=WAY,
        ),
        "Seconds up to the final norm, as multiples of the plain forward pass of the same model.",
        context=rounds,
    )
    memory = Figure(
        bar_chart(rows, MODEL, Column("extra", "memory over the start", ",.0f", "MiB"), "Memory", series=WAY),
        "Highest resident size over what the process held after loading and a short warm-up.",
        context=rounds,
    )
    linear = Figure(
        line_chart(
            slope.rows,
            Column("length", "tokens", ",d"),
            Column("extra", "memory over the start", ",.0f", "MiB"),
            WAY,
            "Memory by length",
        ),
        f"A straight line is memory linear in T; the most is {longest:,.0f} MiB over the start.",
        context=f"8 layers of 8 heads of 64, width 512, batch 1; {machine}",
    )
    errors = Table(
        [
            Column("case", "logits"),
            Column("dtype", "dtype"),
            Column("length", "tokens", ",d"),
            Column("largest_error", "largest error", ".1e"),
        ],
        costs["errors"],
        "First-token attention against eager softmax in float64 of the same rounded tensors, 9 query and 3 key heads.",
    )
    return Page(
        title="What a diagnosis costs",
        lead=lead,
        command=command,
        sections=[
            Section("Time and memory at 4,096 tokens", content=[time, memory, cost_table(costs), maps_table(costs)]),
            Section("Up to 32,768 tokens", content=[linear, slope]),
            Section("Exactness", content=[errors]),
        ],
        environment=costs["machine"],
    )

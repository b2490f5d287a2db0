"""The results of ``benchmarks/training_step.py`` as a table and a page of charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from goals import interval_text

from gatelab.report.charts import Reference, dot_interval_chart
from gatelab.report.page import Figure, Page, Section
from gatelab.report.tables import Column, Table

RATIO = Column("value", "times the baseline's speed", ".2f")


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each contender at each shape."""
    columns = [
        Column("shape", "shape"),
        Column("name", "contender"),
        Column("tokens_per_second", "tokens/s", ",.0f"),
        Column("limit_share", "share of the limit", ".1%"),
        Column("ratio", "times Qwen3-Next's speed", align="right"),
        Column("ours", "its time over ours", align="right"),
        Column("ready", "ready after, s", ".0f"),
    ]
    return Table(
        columns,
        [
            {
                **{name: row[name] for name in ("shape", "name", "tokens_per_second", "limit_share")},
                "ratio": interval_text(row["baseline_over_this"], ".2f"),
                "ours": interval_text(row["this_over_ours"], ".2f"),
                "ready": row["start"]["ready"],
            }
            for row in rows
        ],
        "Median step, contenders in turns; ratios are medians over rounds with 95 % intervals. The share counts every "
        "contender's work as that of the gated decoder.",
    )


def training_step_page(found: Mapping[str, Any], command: str) -> Page:
    """A chart of speeds for each shape, and the table."""
    rows = found["rows"]
    figures = []
    for shape in found["shapes"]:
        cells = [{"name": row["name"], **row["baseline_over_this"]} for row in rows if row["shape"] == shape]
        chart = dot_interval_chart(
            cells,
            Column("name", "contender"),
            RATIO,
            ("low", "high"),
            f"Speed at {shape}",
            reference=Reference("transformers' Qwen3-Next", 1.0),
        )
        caption = f"Tokens a second over those of transformers' Qwen3-Next, {shape}."
        figures.append(Figure(chart, caption, __doc__ or "", "Median over rounds and its 95 % interval."))
    lead = "; ".join(
        f"{row['shape']}: {row['tokens_per_second']:,.0f} tokens/s, {row['limit_share']:.0%} of the limit, "
        f"{row['baseline_over_this']['value']:.2f} times Qwen3-Next's speed"
        for row in rows
        if row["name"] == "GateLab, gated"
    )
    how = "compiled" if found["compiled"] else "eager"
    text = f"{found['rounds']} rounds, {how}; allocator {found['machine']['allocator']}."
    return Page(
        title="A training step, side by side",
        lead=lead,
        command=command,
        sections=[Section("Speed of a training step", text, [table_of(rows), *figures])],
        environment=dict(found["machine"]),
    )

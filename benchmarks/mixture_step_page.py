"""The results of ``benchmarks/mixture_step.py`` as a table and a page of charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from goals import goals_table, goals_text, interval_text

from gatelab.report.charts import Reference, dot_interval_chart
from gatelab.report.page import Figure, Page, Section
from gatelab.report.tables import Column, Table

_DENSE = "times the dense model's time"


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each contender."""
    columns = [
        Column("name", "contender"),
        Column("tokens_per_second", "tokens/s", ",.0f"),
        Column("limit_share", "share of the limit", ".1%"),
        Column("dense", _DENSE, align="right"),
        Column("mixture", "its time over our mixture's", align="right"),
        Column("peak", "peak, MB", ",.0f"),
        Column("ready", "ready after, s", ".0f"),
    ]
    return Table(
        columns,
        [
            {
                **{name: row[name] for name in ("name", "tokens_per_second", "limit_share")},
                "dense": interval_text(row["over_dense"], ".2f"),
                "mixture": interval_text(row["over_mixture"], ".2f"),
                "peak": None if None in row["peak_bytes"] else max(row["peak_bytes"]) / 1e6,
                "ready": row["start"]["ready"],
            }
            for row in rows
        ],
        "Median step, contenders in turns; ratios are medians over rounds with 95 % intervals. The share counts each "
        "contender's own operations; the peak is all that its process held during a step. Qwen3-MoE is named "
        "with how its experts are computed and the dtype of its weights.",
    )


def mixture_step_page(found: Mapping[str, Any], command: str) -> Page:
    """A chart of times, the table, and the goals."""
    rows = found["rows"]
    chart = dot_interval_chart(
        [{"name": row["name"], **row["over_dense"]} for row in rows],
        Column("name", "contender"),
        Column("value", _DENSE, ".2f"),
        ("low", "high"),
        "Time of a training step",
        reference=Reference("GateLab, dense", 1.0),
    )
    shape, mixture = found["shape"], found["mixture"]
    router = max(row["router_flops"] / row["flops"] for row in rows)
    text = (
        f"{shape['num_layers']} layers of width {shape['width']}, {shape['num_heads']} query and "
        f"{shape['num_kv_heads']} key/value heads of {shape['head_size']}, {shape['sequences']} sequences of "
        f"{shape['context']} tokens; {mixture['num_experts']} experts of width {mixture['expert_width']}, "
        f"{mixture['experts_per_token']} for each token, against a dense feed-forward of width "
        f"{shape['feedforward_width']}. The router takes {router:.2%} of a step's operations. "
        f"{found['rounds']} rounds; allocator {found['machine']['allocator']}."
    )
    figure = Figure(
        chart, "Time of a step over that of the dense model.", "Median over rounds and its 95 % interval.", text
    )
    return Page(
        title="A training step of a mixture of experts",
        lead=goals_text(found["goals"], "; "),
        command=command,
        sections=[Section("Time of a training step", text, [goals_table(found["goals"]), table_of(rows), figure])],
        environment=dict(found["machine"]),
    )

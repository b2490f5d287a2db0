"""The results of ``benchmarks/data.py`` as tables and a page of charts."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from goals import goals_table, goals_text, interval_text

from gatelab.report.charts import Reference, dot_interval_chart, line_chart
from gatelab.report.page import Figure, Page, Section
from gatelab.report.tables import Column, Table

_MEGABYTE = 10**6


def speed_table(found: Mapping[str, Any]) -> Table:
    """Each contender's turn, and its MB/s where it tokenizes."""
    columns = [
        Column("name", "what"),
        Column("milliseconds", "a turn, ms", ",.1f"),
        Column("speed", "MB/s of text", align="right"),
    ]
    rows = []
    for row in found["rows"]:
        speed = row.get("megabytes_per_second")
        milliseconds = 1e3 * median(row["seconds"])
        rows.append({"name": row["name"], "milliseconds": milliseconds, "speed": speed and interval_text(speed, ".2f")})
    share = interval_text({end: 100 * value for end, value in found["loader_share"].items()}, ".3f")
    caption = (
        f"Medians of {found['rounds']} rounds, all in turns, with 95 % intervals. A turn of tokenizing reads about "
        f"{found['text_megabytes']} MB. One batch takes {share} % of the step."
    )
    return Table(columns, rows, caption)


def memory_table(found: Mapping[str, Any]) -> Table:
    """What each size of corpus takes."""
    columns = [
        Column("work", "what"),
        Column("tokens_per_shard", "tokens in a shard", ",d"),
        Column("text", "text, MB", ",.0f"),
        Column("peak", "memory, MB", ",.0f"),
        Column("own", "without mapped files at the end, MB", ",.0f"),
        Column("seconds", "seconds", ",.1f"),
    ]
    rows = [_in_megabytes(row) for row in found["memory"]]
    return Table(columns, rows, "The most that a process held above what it held before it began; one process each.")


def data_page(found: Mapping[str, Any], command: str) -> Page:
    """Charts of speed and memory, tables, and the goals."""
    speeds = [
        {"name": row["name"], **row["megabytes_per_second"]} for row in found["rows"] if "megabytes_per_second" in row
    ]
    speed = dot_interval_chart(
        speeds,
        Column("name", "what"),
        Column("value", "MB/s of text", ".2f"),
        ("low", "high"),
        "Tokenizing",
        reference=Reference("goal for one core", found["goals"][0]["bound"]),
    )
    memory = line_chart(
        [_in_megabytes(row) for row in found["memory"]],
        Column("text", "text", ",.0f", unit="MB"),
        Column("peak", "memory", ",.0f", unit="MB"),
        Column("series", "what"),
        "Memory against the size of the corpus",
        log_x=True,
    )
    caption = "Text that a second turns into token shards, or that the bare tokenizer encodes."
    figures = [
        Figure(speed, caption, "Median over rounds and its 95 % interval.", f"{found['rounds']} rounds, in turns."),
        Figure(
            memory,
            "The most that a process held above what it held before it began.",
            "Resident pages, those of mapped shards among them, by Linux's count.",
            "One process for each point.",
        ),
    ]
    return Page(
        title="What a run's data costs",
        lead=goals_text(found["goals"][:2], "; "),
        command=command,
        sections=[
            Section("Goals", "", [goals_table(found["goals"])]),
            Section("Tokenizing and loading", "", [speed_table(found), figures[0]]),
            Section("Memory", "", [memory_table(found), figures[1]]),
        ],
        environment=dict(found["machine"]),
    )


def _in_megabytes(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of memory with sizes in MB and the name of its line."""
    return {
        **row,
        "series": f"{row['work']}, shards of {row['tokens_per_shard']:,d} tokens",
        "text": row["text_bytes"] / _MEGABYTE,
        "peak": row["peak_bytes"] / _MEGABYTE,
        "own": None if row["own_bytes"] is None else row["own_bytes"] / _MEGABYTE,
    }

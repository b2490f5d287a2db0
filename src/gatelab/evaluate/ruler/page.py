"""The report of a RULER evaluation, from its result alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gatelab.evaluate.ruler.results import cell_rows, comparison_note, depth_rows, mean_rows, score_table
from gatelab.evaluate.ruler.running import Cell, RulerResult
from gatelab.report.charts import heat_map, line_chart
from gatelab.report.page import Figure, Page, Section
from gatelab.report.tables import Column, Table

SCORE = (
    "The mean share of a sample's references that stand in what was generated, whatever their case; for qa, any one."
)
INTERVAL = "Wilson's interval over samples; it says nothing of other models or prompts."
DEPTH = (
    "The depth is where the last mention of the answer begins, in characters of the input. A cell is the mean of few "
    "samples; empty cells had none."
)
_LEAST_RATIO_OF_LOG = 8
_LENGTH = Column("length", "length", ",d", unit="tokens")
_SCORE = Column("score", "score", ".1f", unit="%")
_TASK = Column("task", "task")


def ruler_page(result: RulerResult, command: str) -> Page:
    """The page; ``command`` is what redoes it."""
    cells = result.cells
    context = _context_line(result)
    sections = [
        Section("Scores", "", [score_table(cells), *_score_charts(cells, context)]),
        Section("Needles by depth", DEPTH, _depth_map(cells, context)),
        Section("Answers", "", [_answer_table(cells)]),
        Section("Context", "", [_context_table(result)]),
    ]
    return Page(
        title=f"{_family(cells)} on {Path(result.context['model']['name']).name}",
        lead=_lead(cells),
        command=command,
        sections=[section for section in sections if section.content],
    )


def _family(cells: Sequence[Cell]) -> str:
    mini = {cell.task.name.startswith("mini_") for cell in cells}
    return "RULER and mini needles" if len(mini) > 1 else "Mini needles (not RULER)" if mini.pop() else "RULER"


def _lead(cells: Sequence[Cell]) -> str:
    means = [
        f"{row['tasks'].capitalize()} at {row['length']:,} tokens: {row['score']:.1f} % "
        f"({row['low']:.1f} to {row['high']:.1f})."
        for row in mean_rows(cells)
    ]
    return "\n\n".join([" ".join(means), comparison_note(cells)])


def _score_charts(cells: Sequence[Cell], context: str) -> list[Figure]:
    rows, note = cell_rows(cells), comparison_note(cells)
    chart = heat_map(rows, _LENGTH, _TASK, _SCORE, "Score by task and length", end=100.0)
    figures = [Figure(chart, f"Each task at each length. {note}", SCORE, context)]
    means = mean_rows(cells)
    lengths = {row["length"] for row in means}
    if len(lengths) > 1:
        log, tasks = max(lengths) > _LEAST_RATIO_OF_LOG * min(lengths), Column("tasks", "tasks")
        chart = line_chart(means, _LENGTH, _SCORE, tasks, "Mean score by length", log_x=log, band=("low", "high"))
        figures.append(Figure(chart, f"The plain mean of the tasks. {note}", f"{SCORE} {INTERVAL}", context))
    return figures


def _depth_map(cells: Sequence[Cell], context: str) -> list[Figure]:
    rows = depth_rows(cells)
    if not rows:
        return []
    panel = _TASK if len({row["task"] for row in rows}) > 1 else None
    depth = Column("depth", "depth of the needle")
    chart = heat_map(rows, _LENGTH, depth, _SCORE, "Needles found, by depth and length", panel=panel, end=100.0)
    caption = f"Tasks with one needle to find. {comparison_note(cells)}"
    return [Figure(chart, caption, f"{SCORE} {DEPTH}", context)]


def _answer_table(cells: Sequence[Cell]) -> Table:
    columns = [
        _TASK,
        _LENGTH,
        Column("samples", "samples", ",d"),
        Column("empty", "empty", ",d"),
        Column("longest_input", "longest input", ",d"),
        Column("new_tokens", "generated", ",d"),
        Column("speed", "tokens/s", ",.0f"),
        Column("comparable", "comparable"),
    ]
    rows = [row | {"speed": cell.record.tokens_per_second} for cell, row in zip(cells, cell_rows(cells), strict=True)]
    caption = (
        "Empty predictions; the longest input in tokens, BOS among them; tokens generated in all; tokens read and "
        f"generated a second. {comparison_note(cells)}"
    )
    return Table(columns, rows, caption)


def _context_line(result: RulerResult) -> str:
    context = result.context
    known = "unknown" if context["max_context"] is None else f"{context['max_context']:,} tokens"
    return (
        f"{context['samples']:,} samples of each task and length, seed {context['seed']}; {context['prompt']} prompt; "
        f"greedy; {context['dtype']}; the model's own context: {known}"
    )


def _context_table(result: RulerResult) -> Table:
    rows = [{"key": key, "value": value} for key, value in _flattened(result.context).items()]
    return Table([Column("key", ""), Column("value", "value")], rows, "How the model was asked.")


def _flattened(value: Any, name: str = "") -> dict[str, Any]:
    """Nested plain values as one row each."""
    if isinstance(value, dict):
        parts = [_flattened(item, f"{name} {key.replace('_', ' ')}".strip()) for key, item in value.items()]
        return {key: item for part in parts for key, item in part.items()}
    return {name: ", ".join(map(str, value)) if isinstance(value, list) else value}

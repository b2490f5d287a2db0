"""What a RULER evaluation found: intervals, tidy rows, tables, and the files that programs read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from gatelab.evaluate.ruler.running import Cell, RulerResult
from gatelab.evaluate.ruler.sample import answer_depth
from gatelab.evaluate.ruler.scoring import clean
from gatelab.evaluate.ruler.tasks import MINI_TASKS, RULER_TASKS
from gatelab.files import write_atomically
from gatelab.report.folder import to_csv
from gatelab.report.tables import Column, Table

SCHEMA_VERSION = 1
NORMAL_QUANTILE = 1.959963984540054  # 97.5 %
NUM_DEPTHS = 10


class Interval(NamedTuple):
    """A score in percent with its 95 % interval."""

    score: float
    low: float
    high: float

    def text(self) -> str:
        """For a table's cell."""
        return f"{self.score:.1f} [{self.low:.1f}, {self.high:.1f}]"


def interval_of(score: float, num_samples: int) -> Interval:
    """Wilson's interval of a share (1927), which holds at 0 and 100 % too, in percent.

    A sample may score between 0 and 1. No such score of that mean has a larger variance than one of zeros and ones, so
    the interval is wide enough. It speaks of other samples, not of other models.
    """
    share, spread = score / 100, NORMAL_QUANTILE**2 / num_samples
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * share * (1 - share) + spread**2 / 4) / (1 + spread)
    return Interval(score, 100 * max(0.0, middle - half), 100 * min(1.0, middle + half))


def mean_of_intervals(parts: Sequence[Interval]) -> Interval:
    """The plain mean of independent scores: each side is the root of the summed squares of theirs (Zou & Donner 2008,
    "Construction of confidence limits about effect measures")."""
    mean, number = fmean(part.score for part in parts), len(parts)
    below = math.hypot(*(part.score - part.low for part in parts)) / number
    above = math.hypot(*(part.high - part.score for part in parts)) / number
    return Interval(mean, mean - below, mean + above)


def cell_interval(cell: Cell) -> Interval:
    """The score of one task at one length."""
    return interval_of(cell.score.mean, len(cell.asked.samples))


def mean_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The mean of a length's tasks, RULER's and our own apart: ``tasks`` names what was averaged."""
    rows = []
    for family, name in ((RULER_TASKS, "RULER tasks"), (MINI_TASKS, "mini tasks")):
        members = [cell for cell in cells if cell.task.name in family]
        asked = len({cell.task.name for cell in members})
        of_all = "" if asked == len(family) else f" of {len(family)}"
        for length in sorted({cell.asked.length for cell in members}):
            mean = mean_of_intervals([cell_interval(cell) for cell in members if cell.asked.length == length])
            rows.append({"tasks": f"mean of {asked}{of_all} {name}", "length": length, **mean._asdict()})
    return rows


def cell_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """A row for each task and length, with the columns of ``results.csv``."""
    rows = []
    for cell in cells:
        predictions = cell.record.predictions
        rows.append(
            {"task": cell.task.name, "length": cell.asked.length}
            | cell_interval(cell)._asdict()
            | {"samples": len(cell.asked.samples), "empty": cell.score.empty}
            | {"comparable": cell.asked.comparable, "reason": cell.asked.reason}
            | {
                "longest_input": max(one.input_tokens for one in predictions),
                "input_tokens": sum(one.input_tokens for one in predictions),
                "new_tokens": sum(one.new_tokens for one in predictions),
                "seconds": cell.record.seconds,
            }
        )
    return rows


def depth_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Mean scores by task, length and tenth of the input in which the answer stands, for tasks with one answer to find.

    Questions about a text have answers that may stand anywhere, so ``qa`` is not among them. Deepest last.
    """
    rows = []
    for cell in cells:
        if cell.task.match != "all" or any(len(sample.outputs) != 1 for sample in cell.asked.samples):
            continue
        by_depth: dict[int, list[float]] = {}
        for sample, score in zip(cell.asked.samples, cell.score.per_sample, strict=True):
            by_depth.setdefault(min(NUM_DEPTHS - 1, int(NUM_DEPTHS * answer_depth(sample))), []).append(score)
        for depth in range(NUM_DEPTHS):
            scores = by_depth.get(depth)
            place = {
                "task": cell.task.name,
                "length": cell.asked.length,
                "depth": f"{10 * depth} to {10 * (depth + 1)} %",
            }
            rows.append(place | {"score": fmean(scores) if scores else None, "samples": len(scores or ())})
    return rows


def sample_rows(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """A row for each sample: its references, what was predicted and how that was scored."""
    for cell in cells:
        together = zip(cell.asked.samples, cell.record.predictions, cell.score.per_sample, strict=True)
        for sample, prediction, score in together:
            yield {
                "task": cell.task.name,
                "length": cell.asked.length,
                "index": sample.index,
                "outputs": sample.outputs,
                "prediction": clean(prediction.text),
                "score": score,
                "input_tokens": prediction.input_tokens,
                "new_tokens": prediction.new_tokens,
            }


def comparison_note(cells: Sequence[Cell]) -> str:
    """One sentence for under a table: whether its scores compare with those that others publish for RULER."""
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        if not cell.asked.comparable:
            is_ours = cell.task.name in MINI_TASKS
            named = reasons.setdefault("tasks of our own" if is_ours else cell.asked.reason, [])
            named += [cell.task.name] if cell.task.name not in named else []
    if not reasons:
        return "Comparable with RULER at equal lengths and prompts."
    if len(reasons) == 1 and not any(cell.asked.comparable for cell in cells):
        return f"Not comparable with RULER: {next(iter(reasons))}."
    listed = "; ".join(f"{', '.join(tasks)} ({reason})" for reason, tasks in reasons.items())
    if any(cell.asked.comparable for cell in cells):
        return f"Comparable with RULER at equal lengths and prompts, except {listed}."
    return f"Not comparable with RULER: {listed}."


def score_table(cells: Sequence[Cell]) -> Table:
    """Tasks by lengths, then their means, each score with its interval."""
    lengths = sorted({cell.asked.length for cell in cells})
    columns = [Column("task", "task"), *(Column(str(length), f"{length:,}", align="right") for length in lengths)]
    rows: dict[str, dict[str, Any]] = {}
    for cell in cells:
        row = rows.setdefault(cell.task.name, {"task": cell.task.name})
        row[str(cell.asked.length)] = cell_interval(cell).text()
    for mean in mean_rows(cells):
        row = rows.setdefault(mean["tasks"], {"task": mean["tasks"]})
        row[str(mean["length"])] = Interval(mean["score"], mean["low"], mean["high"]).text()
    caption = f"Scores in percent with 95 % intervals over samples, by length in tokens. {comparison_note(cells)}"
    return Table(columns, list(rows.values()), caption)


def write_results(result: RulerResult, folder: Path) -> None:
    """Write ``results.json``, ``results.csv`` and ``predictions.jsonl``."""
    rows = cell_rows(result.cells)
    content = {
        "schema_version": SCHEMA_VERSION,
        **result.context,
        "note": comparison_note(result.cells),
        "results": rows,
        "means": mean_rows(result.cells),
        "depths": depth_rows(result.cells),
    }
    write_atomically(folder / "results.json", json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    write_atomically(folder / "results.csv", to_csv(list(rows[0]), rows))
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in sample_rows(result.cells))
    write_atomically(folder / "predictions.jsonl", "".join(lines))

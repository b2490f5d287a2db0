"""What an evaluation found: a record for each task, a folder that keeps them, rows and a table."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gatelab.files import atomic_path, remove_leftovers, require_folder, write_atomically
from gatelab.report.tables import Column, Table
from gatelab.settings import Settings

SCHEMA_VERSION = 1
RESULT, SAMPLES = "result.json", "samples.jsonl"
COLUMNS = ("task", "metric", "value", "stderr", "higher_is_better", "samples", "shots", "version", "truncated", "note")


class Figure(Settings):
    """One number of a task; ``value`` is ``None`` when it is not finite.

    ``stderr`` is its standard error, ``None`` when unknown: of a mean over n samples s / sqrt(n), with n - 1 in the
    denominator of s squared.
    """

    metric: str
    value: float | None
    stderr: float | None = None
    higher_is_better: bool | None = None


class TaskResult(Settings):
    """The figures of a task, or of a group of tasks (``subtasks``); or, with ``missing``, why there are none.

    ``truncated`` counts the samples whose text did not fit into the model's context: their beginning was cut off.
    ``key`` is a digest of all that decides the figures: the model, the task, its data and its settings.
    """

    task: str
    figures: tuple[Figure, ...] = ()
    version: str = ""
    shots: int | None = None
    samples: int = 0
    truncated: int = 0
    subtasks: tuple[str, ...] = ()
    missing: str | None = None
    key: str = ""


class ResultFolder:
    """``tasks/NAME-KEY/`` for each task, written when it is known; ``results.json`` and ``results.csv`` for all."""

    def __init__(self, path: Path):
        require_folder(path)
        self.path = path
        if (path / "tasks").is_dir():
            remove_leftovers(path / "tasks")

    def find(self, task: str, key: str) -> TaskResult | None:
        """The result of an earlier evaluation under the same key; ``ValueError`` names a damaged file."""
        file = self._folder(task, key) / RESULT
        if not file.exists():
            return None
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            version = content.pop("schema_version")
            result = TaskResult.parse(content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{file} is damaged; delete {file.parent} to evaluate {task} again") from None
        if version != SCHEMA_VERSION or result.key != key:
            raise ValueError(f"{file} is of another version or key; delete {file.parent} to evaluate {task} again")
        return result

    def keep(self, result: TaskResult, samples: Iterable[Mapping[str, Any]]) -> None:
        """Write one task's figures and its samples, one JSON object in a line, together or not at all."""
        with atomic_path(self._folder(result.task, result.key)) as temporary:
            temporary.mkdir()
            with (temporary / SAMPLES).open("w", encoding="utf-8") as stream:
                stream.writelines(json.dumps(sample, default=str, ensure_ascii=False) + "\n" for sample in samples)
            content = {"schema_version": SCHEMA_VERSION, **result.to_mapping()}
            write_atomically(temporary / RESULT, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def finish(self, results: Sequence[TaskResult], context: Mapping[str, Any]) -> None:
        """Write all results of one evaluation with the context that they stand in."""
        content = {
            "schema_version": SCHEMA_VERSION,
            **context,
            "results": [result.to_mapping() for result in results],
        }
        write_atomically(self.path / "results.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([row[column] for column in COLUMNS] for row in result_rows(results))
        write_atomically(self.path / "results.csv", text.getvalue())

    def _folder(self, task: str, key: str) -> Path:
        return self.path / "tasks" / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', task)}-{key[:12]}"


def finite(value: float) -> float | None:
    """The number, or ``None`` for one that JSON does not have."""
    return float(value) if math.isfinite(value) else None


def standard_error(values: Sequence[float]) -> float | None:
    """s / sqrt(n) of n samples; ``None`` of fewer than two."""
    return finite(statistics.stdev(values) / math.sqrt(len(values))) if len(values) > 1 else None


def result_rows(results: Iterable[TaskResult]) -> list[dict[str, Any]]:
    """A row for each figure, and one for each task that has none."""
    rows = []
    for result in results:
        shared = {"samples": result.samples, "shots": result.shots, "version": result.version}
        shared |= {"truncated": result.truncated, "note": result.missing or ""}
        for figure in result.figures or (Figure(metric="", value=None),):
            rows.append({"task": result.task, **figure.to_mapping(), **shared})
    return rows


def result_table(results: Sequence[TaskResult]) -> Table:
    """The figures for readers: groups and single tasks, without the members of groups, which ``results.csv`` has.

    Why a task is missing stands in :func:`missing_sentences`.
    """
    members = {member for result in results for member in result.subtasks if result.figures}
    columns = [
        Column("task", "task"),
        Column("metric", "metric"),
        Column("value", "value", ".4f"),
        Column("stderr", "standard error", ".4f"),
        Column("samples", "samples", ",d"),
        Column("shots", "shots", "d"),
        Column("version", "version"),
    ]
    if any(result.truncated for result in results):
        columns.append(Column("truncated", "cut off", ",d"))
    return Table(columns, result_rows(result for result in results if result.task not in members))


def missing_sentences(results: Sequence[TaskResult]) -> list[str]:
    """What could not be had, and why, a line each."""
    return [f"{result.task} is missing: {result.missing}" for result in results if result.missing]

"""A model's tidy rows under its name, and the selections of them that a verdict or a chart needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from gatelab.diagnose.measurement import COLUMNS

__all__ = ["ALL_QUERIES", "COLUMNS", "NamedResult", "Row"]

Row = Mapping[str, Any]

ALL_QUERIES = "all"


@dataclass(frozen=True)
class NamedResult:
    """What was measured of one model, at one step: rows with the columns ``COLUMNS``, and how it was measured.

    A row whose value is ``None`` says that there was nothing to measure; no selection returns it.
    """

    name: str
    rows: Sequence[Row]
    context: Mapping[str, Any]

    @cached_property
    def _by_metric(self) -> dict[str, list[Row]]:
        groups: dict[str, list[Row]] = defaultdict(list)
        for row in self.rows:
            if row["value"] is not None:
                groups[row["metric"]].append(row)
        return dict(groups)

    @property
    def metrics(self) -> list[str]:
        """The metrics that have a value, in the order of their rows."""
        return list(self._by_metric)

    def select(self, metric: str, query_range: str = ALL_QUERIES) -> list[Row]:
        """The rows of a metric over these queries; a row that names no range is over all of them."""
        return [row for row in self._by_metric.get(metric, []) if (row["query_range"] or ALL_QUERIES) == query_range]

    def query_ranges(self, metric: str) -> list[str]:
        """The ranges of queries that a metric was measured over, but for all of them."""
        ranges = dict.fromkeys(row["query_range"] or ALL_QUERIES for row in self._by_metric.get(metric, []))
        return [one for one in ranges if one != ALL_QUERIES]

    def arguments(self, metric: str) -> list[str]:
        """The texts in brackets that a metric's name occurs with: gate positions, delimiter tokens."""
        start = f"{metric}["
        return [name[len(start) : -1] for name in self._by_metric if name.startswith(start) and name.endswith("]")]

    def by_layer(self, metric: str, query_range: str = ALL_QUERIES, column: str = "value") -> dict[int, float]:
        """A column's mean over the heads of each layer, layers in order; a row for a whole layer stands for itself.

        The embedding, layer -1 of the rows, is no layer here.
        """
        groups: dict[int, list[Row]] = defaultdict(list)
        for row in self.select(metric, query_range):
            if row["layer"] is not None and row["layer"] >= 0 and row[column] is not None:
                groups[row["layer"]].append(row)
        means = {}
        for layer in sorted(groups):
            whole = [row for row in groups[layer] if row["head"] is None]
            means[layer] = fmean(row[column] for row in whole or groups[layer])
        return means

    def by_head(self, metric: str, query_range: str = ALL_QUERIES) -> dict[tuple[int, int], float]:
        """The value of each layer's heads, in order."""
        rows = [row for row in self.select(metric, query_range) if row["head"] is not None]
        return {(row["layer"], row["head"]): float(row["value"]) for row in sorted(rows, key=_layer_and_head)}

    def mean(self, metric: str, query_range: str = ALL_QUERIES, column: str = "value") -> float | None:
        """The mean over heads, then over layers, as in the paper; ``None`` where nothing was measured."""
        layers = self.by_layer(metric, query_range, column)
        return fmean(layers.values()) if layers else None

    def whole(self, metric: str) -> float | None:
        """The value of a metric that speaks of the whole model, in a row without a layer."""
        return next((float(row["value"]) for row in self.select(metric) if row["layer"] is None), None)


def _layer_and_head(row: Row) -> tuple[int, int]:
    return row["layer"], row["head"]

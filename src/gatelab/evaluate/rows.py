"""One figure as one row of the tidy table that every examination of a model fills."""

from __future__ import annotations

from typing import Any, NamedTuple


class Subject(NamedTuple):
    """Whose figures they are: the model's name, and the training step of its checkpoint if it has one."""

    model: str
    step: int | None = None

    def row(
        self, metric: str, value: float, n: int, *, layer: int | None = None, query_range: str | None = None
    ) -> dict[str, Any]:
        """A row with the columns of ``metrics.csv``; ``n`` is the number of values behind the figure."""
        return {
            "model": self.model,
            "step": self.step,
            "layer": layer,
            "head": None,
            "channel": None,
            "query_range": query_range,
            "metric": metric,
            "value": value,
            "floor": None,
            "n": n,
        }

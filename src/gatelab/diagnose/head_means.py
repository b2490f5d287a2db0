"""Means by head over counted queries, added up batch by batch, and the figures that come of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class HeadFigure(NamedTuple):
    """One figure of one layer by head, over ``n`` queries, samples or tokens as its definition says.

    ``floors`` are what uniform attention gives under the same visibility, where that means something.
    """

    metric: str
    query_range: str
    values: list[float]
    floors: list[float] | None
    n: int


class HeadMean:
    """Running sums of one quantity by head; what is not counted never enters, not even as a NaN."""

    def __init__(self) -> None:
        self.count = 0
        self.total: Float[Tensor, "H"] | None = None
        self.uniform: float | None = None

    def add(
        self,
        values: Float[Tensor, "B H T"],
        counted: Bool[Tensor, "#B #T"],
        uniform: Float[Tensor, "#B #T"] | None = None,
    ) -> None:
        """Add the counted queries; ``uniform`` is the same quantity under uniform attention."""
        num_samples, _, num_queries = values.shape
        total = torch.where(counted[:, None], values, 0).sum((0, 2), dtype=torch.float64).cpu()
        self.total = total if self.total is None else self.total + total
        counted = counted.expand(num_samples, num_queries)
        self.count += int(counted.sum())
        if uniform is not None:
            sum_uniform = float(torch.where(counted, uniform, 0).sum(dtype=torch.float64))
            self.uniform = sum_uniform + (self.uniform or 0.0)

    @property
    def means(self) -> list[float]:
        """The mean of each head; only where something was counted."""
        assert self.total is not None and self.count
        return (self.total / self.count).tolist()

    def figures(self, metric: str, query_range: str = "all") -> Sequence[HeadFigure]:
        """The mean as a figure, or none where nothing was counted."""
        if not self.count:
            return ()
        floors = None if self.uniform is None else [self.uniform / self.count] * len(self.means)
        return (HeadFigure(metric, query_range, self.means, floors, self.count),)

"""Pearson's correlation of two quantities over queries, added up batch by batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Correlation(NamedTuple):
    """By head over ``queries`` queries, and ``whole`` over the pairs of all heads and queries together.

    ``None`` where one of the two quantities does not vary.
    """

    whole: float | None
    by_head: list[float | None]
    queries: int


class CorrelationTotals:
    """Running moments of pairs by head; what is not counted never enters, not even as a NaN."""

    def __init__(self) -> None:
        self.moments: Float[Tensor, "5 H"] | None = None
        self.count = 0

    def add(self, x: Float[Tensor, "B H T"], y: Float[Tensor, "B H T"], counted: Bool[Tensor, "#B T"]) -> None:
        """Add the pairs of the counted queries."""
        counted = counted.expand(len(x), -1)
        x, y = (torch.where(counted[:, None], one, 0).double() for one in (x, y))
        moments = torch.stack([one.sum((0, 2)) for one in (x, y, x * x, y * y, x * y)]).cpu()
        self.moments = moments if self.moments is None else self.moments + moments
        self.count += int(counted.sum())

    def correlation(self) -> Correlation | None:
        """The correlations over all passes; ``None`` when no pair came."""
        if self.moments is None or not self.count:
            return None
        means = self.moments / self.count
        return Correlation(_pearson(means.mean(1, keepdim=True))[0], _pearson(means), self.count)


def _pearson(means: Float[Tensor, "5 N"]) -> list[float | None]:
    x, y, xx, yy, xy = means
    found: list[float | None] = []
    for covariance, *variances in zip(xy - x * y, xx - x * x, yy - y * y, strict=True):
        # A variance that is all rounding error is none.
        has_spread = all(
            variance > 1e-12 * mean for variance, mean in zip(variances, (xx.max(), yy.max()), strict=True)
        )
        found.append(float(covariance / (variances[0] * variances[1]).sqrt()) if has_spread else None)
    return found

"""What a mean over texts leaves open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from scipy.special import stdtrit


class Interval(NamedTuple):
    """A mean over samples with its 95 % t interval."""

    mean: float
    low: float
    high: float

    @property
    def ends(self) -> tuple[float, float]:
        """Both, as a table writes them."""
        return self.low, self.high


def mean_interval(values: Sequence[float]) -> Interval:
    """mean -/+ t s / sqrt(n), t the 0.975 quantile of Student's distribution with n - 1 degrees of freedom."""
    count, mean = len(values), fmean(values)
    half = float(stdtrit(count - 1, 0.975)) * stdev(values) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half)

"""Student's distribution by adding up its density, and moments by loops."""

from __future__ import annotations

import math
from collections.abc import Sequence


def density(degrees: int, t: float) -> float:
    """Gamma((v + 1) / 2) / (sqrt(v pi) Gamma(v / 2)) (1 + t^2 / v)^(-(v + 1) / 2)."""
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    return scale * (1 + t * t / degrees) ** (-(degrees + 1) / 2)


def student_tail(degrees: int, t: float, pieces: int = 4000) -> float:
    """P(T > t): half, less the density from 0 to t by Simpson's rule."""
    step = t / pieces
    total = density(degrees, 0.0) + density(degrees, t)
    for piece in range(1, pieces):
        total += (4 if piece % 2 else 2) * density(degrees, piece * step)
    return 0.5 - total * step / 3


def student_quantile(degrees: int, share: float) -> float:
    """The t that a ``share`` above one half lies below, by halving."""
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - student_tail(degrees, middle) < share else (low, middle)
    return low


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and the standard deviation with divisor S - 1."""
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))

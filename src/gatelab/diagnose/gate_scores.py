"""Gate scores: how open, how sparse."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

HISTOGRAM_BINS = 20


class GateStatistics(NamedTuple):
    """Statistics of one gate's scores; ``histogram`` counts 20 equal bins of [0, 1], values beyond in the end bins."""

    mean: float
    below_tenth: float
    above_nine_tenths: float
    mean_by_head: list[float]
    histogram: list[int]


def gate_statistics(scores: Float[Tensor, "B T N C1"]) -> GateStatistics:
    """Over all samples, tokens, heads and channels. A headwise score counts once for its head."""
    scores = scores.float()
    # In float64, because a float32 bin stops counting at 2^24.
    histogram = torch.histc(scores.clamp(0, 1).double(), bins=HISTOGRAM_BINS, min=0, max=1)
    return GateStatistics(
        mean=float(scores.mean()),
        below_tenth=float((scores < 0.1).float().mean()),
        above_nine_tenths=float((scores > 0.9).float().mean()),
        mean_by_head=[float(mean) for mean in scores.mean((0, 1, 3))],
        histogram=[int(count) for count in histogram],
    )

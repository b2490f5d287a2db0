"""How fast a run is, against what this machine can do."""

from __future__ import annotations

import math
import time
from collections import deque

import torch

from gatelab.model.accounting import flops_per_token_training
from gatelab.train.parallel.mesh import CPU
from gatelab.train.settings import RunSettings

SIZES = {"cpu": 1024, "cuda": 8192}


def measure_peak(
    dtype: torch.dtype, size: int | None = None, repetitions: int = 20, device: torch.device = CPU
) -> float:
    """Floating point operations a second of a device's matrix product: the best of 20, of size 1,024 or 8,192 cubed."""
    size = size or SIZES[device.type]
    a, b = torch.ones(2, size, size, dtype=dtype, device=device)
    best = math.inf
    for _ in range(repetitions):
        _wait_for(device)
        began = time.perf_counter()
        torch.mm(a, b)
        _wait_for(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Seconds of steps, tokens per second over the last twenty, and the share of the measured peak."""

    def __init__(self, settings: RunSettings, device: torch.device = CPU):
        self.peak_flops = measure_peak(getattr(torch, settings.train.precision), device=device)
        self._tokens = settings.tokens_per_step
        self._flops = self._tokens * flops_per_token_training(
            settings.model, settings.data.context, settings.train.recompute
        )
        self._recent: deque[float] = deque(maxlen=20)
        self._began = 0.0

    def start(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def stop(self) -> float:
        """The step is done; its seconds."""
        seconds = time.perf_counter() - self._began
        self._recent.append(seconds)
        return seconds

    @property
    def tokens_per_second(self) -> float:
        """Over the last twenty steps."""
        return self._tokens * len(self._recent) / sum(self._recent)

    @property
    def peak_share(self) -> float:
        """Achieved over measured peak floating point operations a second, over the last twenty steps."""
        return self._flops * len(self._recent) / sum(self._recent) / self.peak_flops

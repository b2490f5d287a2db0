"""When a run's loss has risen for good."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from gatelab.train.divergence import MEDIAN_WINDOW, RiseMonitor


def first_mark_by_loops(losses: list[float]) -> int | None:
    """The first step after which the median of the last 25 is over the least of all such medians + 1."""
    for step in range(MEDIAN_WINDOW, len(losses) + 1):
        medians = [statistics.median(losses[end - MEDIAN_WINDOW : end]) for end in range(MEDIAN_WINDOW, step + 1)]
        if medians[-1] > min(medians) + 1.0:
            return step
    return None


def first_mark(losses: list[float]) -> int | None:
    monitor = RiseMonitor()
    return next((step for step, loss in enumerate(losses, 1) if monitor.add(loss)), None)


@pytest.mark.parametrize("seed", range(20))
def test_the_mark_is_that_of_loops(seed: int) -> None:
    rng = np.random.default_rng(seed)
    losses = (4.0 + np.cumsum(rng.normal(0.02, 0.15, 120))).tolist()
    assert first_mark(losses) == first_mark_by_loops(losses)


def test_a_spike_is_no_divergence() -> None:
    falling = [4.0 - 0.01 * step for step in range(200)]
    assert first_mark(falling) is None
    falling[60:72] = [9.0] * 12
    assert first_mark(falling) is None


def test_a_lasting_rise_is() -> None:
    assert first_mark([2.0] * 50 + [3.2] * 20) == 50 + MEDIAN_WINDOW // 2 + 1
    assert first_mark([2.0] * 50 + [3.0] * 50) is None


def test_the_first_steps_are_never_judged() -> None:
    assert first_mark([2.0] + [9.0] * (MEDIAN_WINDOW - 1)) is None


def test_resumed_it_goes_on_where_it_was() -> None:
    losses = [2.0] * 50 + [3.2] * 20
    for cut in (10, 40, 60):
        monitor = RiseMonitor(losses[:cut])
        assert next(step for step in range(cut, len(losses)) if monitor.add(losses[step])) == 62

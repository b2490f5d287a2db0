"""Speed figures on a clock that the test turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_runs import tiny_run

from gatelab.model.accounting import flops_per_token_training
from gatelab.report.progress import TrainingProgress
from gatelab.train.loop import train
from gatelab.train.throughput import Clock, measure_peak
from gatelab.train.watch import Unwatched, Watch


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Sets the time that a clock reads next."""
    now = [0.0]

    def set_time(seconds: float) -> None:
        now[0] = seconds

    with monkeypatch.context() as patch:
        patch.setattr("gatelab.train.throughput.time.perf_counter", lambda: now[0])
        yield set_time


def test_rates_are_over_the_last_twenty_steps(turn: Callable[[float], None]) -> None:
    clock, now = Clock(tiny_run()), 0.0
    for seconds in [100.0] * 3 + [0.5] * 19 + [2.5]:
        turn(now)
        clock.start()
        now += seconds
        turn(now)
        assert clock.stop() == pytest.approx(seconds)
        now += 7.0
    tokens, flops = 4 * 19, flops_per_token_training(tiny_run().model, 19)
    assert clock.tokens_per_second == pytest.approx(tokens * 20 / 12.0)
    assert clock.peak_share == pytest.approx(clock.tokens_per_second * flops / clock.peak_flops)


def test_recomputed_layers_count_as_work() -> None:
    shares = []
    for overrides in ([], ["train.recompute=true"]):
        clock = Clock(tiny_run(*overrides))
        clock.start()
        clock.stop()
        shares.append(clock.peak_share / clock.tokens_per_second)
    assert 1.1 < shares[1] / shares[0] < 4 / 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_peak_is_that_of_the_best_product(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three products of 3, 2 and 4 seconds."""
    moments = iter([0.0, 3.0, 3.0, 5.0, 5.0, 9.0])
    monkeypatch.setattr("gatelab.train.throughput.time.perf_counter", lambda: next(moments))
    assert measure_peak(dtype, size=16, repetitions=3) == 2 * 16**3 / 2.0


def test_the_progress_display_can_look_on(tmp_path: Path, cache: Path) -> None:
    out = StringIO()
    progress = TrainingProgress(Console(file=out, width=200))
    assert isinstance(progress, Watch) and isinstance(Unwatched(), Watch)
    with progress:
        train(tiny_run("train.steps=3"), tmp_path / "arm", cache, progress)
    lines = out.getvalue().splitlines()
    assert lines[0] == "arm: 3 steps"
    assert lines[1].startswith("arm  step 1/3  loss 3.") and "tokens/s" in lines[1] and "of peak" in lines[1]
    assert "synthetic: held-out perplexity 2" in lines[-1] and "tokens/s" in lines[-1]

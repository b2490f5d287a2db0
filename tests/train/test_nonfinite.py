"""Steps whose loss or gradient is not finite: stopped at, skipped or rolled back, recorded, and never without end."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Recording, assert_same_run, final_weights, tiny_run

from gatelab.train.checkpoint import checkpoints
from gatelab.train.divergence import DivergedError
from gatelab.train.loop import build, train
from gatelab.train.metrics import read_metrics
from gatelab.train.optimizer import build_optimizer, set_learning_rate
from gatelab.train.parallel.process import cpu_threads, deterministic_kernels
from gatelab.train.run_folder import RunFolder
from gatelab.train.schedule import rate_factor
from gatelab.train.settings import RunSettings
from gatelab.train.source import open_source
from gatelab.train.step import take_step

SAVED_OFTEN = "train.checkpoint={every: 3, keep: 3}"


class Poison:
    """Takes steps, and spoils the loss or the gradient of the given ones; it knows them by their batches."""

    def __init__(self, settings: RunSettings, cache: Path, *steps: int, gradient_only: bool = False):
        source = open_source(settings, cache, lambda stage, num_bytes: None)
        self.batches = [source.train.batch(step - 1, 0, 1, 1).inputs for step in steps]
        self.gradient_only = gradient_only

    def __call__(self, decoder: Any, optimizer: Any, batch: Any, sum_of_nats: Any, *rest: Any) -> Any:
        def spoiled(state: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            nats = sum_of_nats(state, targets)
            if not self.gradient_only:
                return nats * math.nan
            return nats + (1e-60 * (state.sum() * 0).double()).sqrt().to(nats.dtype)

        is_poisoned = any(torch.equal(batch.inputs, one) for one in self.batches)
        return take_step(decoder, optimizer, batch, spoiled if is_poisoned else sum_of_nats, *rest)


def weights_by_loops(settings: RunSettings, cache: Path, poisoned: dict[int, int | None]) -> dict[str, torch.Tensor]:
    """The last weights when each poisoned step is left out and, if it names a step, that step's state is back."""
    with deterministic_kernels(settings.train.deterministic), cpu_threads(settings.train.threads):
        return _weights_by_loops(settings, cache, poisoned)


def _weights_by_loops(settings: RunSettings, cache: Path, poisoned: dict[int, int | None]) -> dict[str, torch.Tensor]:
    source = open_source(settings, cache, lambda stage, num_bytes: None)
    decoder, sum_of_nats = build(settings, compiled=False)
    optimizer = build_optimizer(decoder, settings.train.optimizer)
    states = []
    for step in range(1, settings.train.steps + 1):
        states.append(copy.deepcopy((decoder.state_dict(), optimizer.state_dict())))
        set_learning_rate(optimizer, rate_factor(step - 1, settings.train.steps, settings.train.schedule))
        if step not in poisoned:
            take_step(decoder, optimizer, source.train.batch(step - 1, 0, 1, 1), sum_of_nats, settings.train)
        elif poisoned[step] is not None:
            weights, moments = states[poisoned[step]]
            decoder.load_state_dict(weights)
            optimizer.load_state_dict(copy.deepcopy(moments))
    return decoder.state_dict()


def poisoned_run(monkeypatch: pytest.MonkeyPatch, cache: Path, steps: tuple[int, ...], *overrides: str) -> RunSettings:
    settings = tiny_run(SAVED_OFTEN, *overrides)
    monkeypatch.setattr("gatelab.train.loop.take_step", Poison(settings, cache, *steps))
    return settings


def assert_equal_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("action", "poisoned"),
    [("skip", {1: None, 5: None, 6: None, 12: None}), ("rollback", {5: 3, 6: 3, 9: 6, 11: 9})],
)
def test_the_weights_are_those_of_loops(
    action: str, poisoned: dict[int, int | None], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = poisoned_run(monkeypatch, cache, tuple(poisoned), f"train.on_nonfinite={action}")
    watch = Recording()
    result = train(settings, tmp_path / "run", cache, watch)
    assert_equal_weights(final_weights(tmp_path / "run"), weights_by_loops(settings, cache, poisoned))
    metrics = tmp_path / "run" / "metrics.jsonl"
    events = read_metrics(metrics, "event")
    for row, (step, checkpoint) in zip(events, poisoned.items(), strict=True):
        expected = {"kind": "event", "step": step, "action": action, "loss": "nan", "gradient_norm": "nan"}
        assert row == expected | ({} if checkpoint is None else {"checkpoint": checkpoint})
    steps = [row["step"] for row in read_metrics(metrics, "step")]
    assert steps == watch.steps == [step for step in range(1, 13) if step not in poisoned]
    assert result["nonfinite_steps"] == events
    assert result["tokens"] == len(steps) * settings.tokens_per_step
    assert len(watch.messages) == len(poisoned)
    assert watch.messages[0].endswith(
        "has loss nan, gradient norm nan: its update is skipped"
        + (", and the weights are those after step 3 again" if action == "rollback" else "")
    )


@pytest.mark.parametrize("action", ["skip", "rollback"])
@pytest.mark.parametrize("stops", [(4,), (8, 10)], ids=str)
def test_a_run_stopped_around_events_ends_with_the_same_bits(
    action: str, stops: tuple[int, ...], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = poisoned_run(monkeypatch, cache, (5, 9), f"train.on_nonfinite={action}", "train.max_nonfinite=2")
    train(settings, tmp_path / "whole", cache)
    watch = Recording(*stops)
    for _ in stops:
        with pytest.raises(KeyboardInterrupt):
            train(settings, tmp_path / "run", cache, watch)
    train(settings, tmp_path / "run", cache, watch)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_gradient_alone_is_enough(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tiny_run(SAVED_OFTEN, "train.on_nonfinite=skip")
    monkeypatch.setattr("gatelab.train.loop.take_step", Poison(settings, cache, 5, gradient_only=True))
    result = train(settings, tmp_path / "run", cache)
    (event,) = result["nonfinite_steps"]
    assert math.isfinite(float(event["loss"])) and event["gradient_norm"] == "nan"
    assert_equal_weights(final_weights(tmp_path / "run"), weights_by_loops(settings, cache, {5: None}))


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_the_limit_stops_the_run(action: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [f"train.on_nonfinite={action}", "train.max_nonfinite=2"]
    settings = poisoned_run(monkeypatch, cache, (5, 8, 11), *overrides)
    message = "step 11 has loss nan and gradient_norm nan, after 2 such steps, as many as train.max_nonfinite allows: "
    for _ in range(2):
        with pytest.raises(DivergedError, match=f"{message}training stopped; the last good checkpoint is .*00000009"):
            train(settings, tmp_path / "run", cache)
    train(settings.with_overrides(["train.max_nonfinite=3"]), tmp_path / "run", cache)
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl", "event")) == 3


def test_nothing_to_roll_back_to(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = poisoned_run(monkeypatch, cache, (2,), "train.on_nonfinite=rollback")
    message = "step 2 has loss nan and gradient_norm nan and can't be rolled back: training stopped; there is no checkp"
    with pytest.raises(DivergedError, match=message):
        train(settings, tmp_path / "run", cache)


def test_a_stopped_run_goes_on_with_another_answer(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = poisoned_run(monkeypatch, cache, (8,))
    with pytest.raises(DivergedError, match=r"train\.on_nonfinite=skip goes on without such a batch"):
        train(settings, tmp_path / "run", cache)
    assert RunFolder(tmp_path / "run").result is None and len(checkpoints(tmp_path / "run" / "checkpoints")) == 2
    skipping = settings.with_overrides(["train.on_nonfinite=skip"])
    train(skipping, tmp_path / "run", cache)
    train(skipping, tmp_path / "whole", cache)
    assert_same_run(tmp_path / "run", tmp_path / "whole")

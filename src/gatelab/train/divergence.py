"""What is done when a run's figures are no longer finite, and the mark of one that lost what it had learned."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gatelab.train.checkpoint import checkpoints, step_of
from gatelab.train.metrics import read_metrics
from gatelab.train.run_folder import RunFolder
from gatelab.train.settings import TrainSettings

MEDIAN_WINDOW, LARGEST_RISE = 25, 1.0


class DivergedError(ArithmeticError):
    """A run is beyond repair after ``num_steps`` steps: a loss, a gradient or a measured figure is not finite."""

    def __init__(self, message: str, num_steps: int):
        super().__init__(message)
        self.num_steps = num_steps


def require_finite(run: RunFolder, num_steps: int, what: str, figures: Mapping[str, object]) -> None:
    """Raise :class:`DivergedError` when a figure computed with the weights after ``num_steps`` steps is not finite.

    Its message names the last good checkpoint, which is one from before those weights.
    """
    wrong = _not_finite(figures)
    if wrong:
        raise DivergedError(_stopped(run, num_steps, f"{what} has {' and '.join(wrong)}"), num_steps)


class NonfiniteSteps:
    """What a run does about steps whose loss or gradient norm is not finite: ``train.on_nonfinite``.

    A skipped step counts as done, so the batches and the learning rate of later steps are what they would have been.
    A rollback skips every update since the checkpoint, as Chowdhery et al. 2204.02311 (5.1) did at loss spikes: with
    the same batches once more, deterministic training would only come to the same place. ``finish_saving`` waits for a
    checkpoint that is still being written.
    """

    def __init__(
        self, run: RunFolder, settings: TrainSettings, completed: int, finish_saving: Callable[[], None] = lambda: None
    ):
        self._run, self._settings, self._finish_saving = run, settings, finish_saving
        rows = read_metrics(run.metrics, "event") if completed else []
        self._count = sum(row["step"] <= completed for row in rows)

    def event(self, completed: int, figures: Mapping[str, float]) -> dict[str, Any] | None:
        """What to record in place of the step after ``completed``, or ``None`` when its figures are finite.

        It has the ``action`` ("skip" or "rollback"), the figures as text, and for a rollback the step of the
        ``checkpoint`` to go back to. Raises :class:`DivergedError` when the run must stop: by setting, after
        ``max_nonfinite`` such steps, or without a checkpoint from before the weights that failed.
        """
        wrong = _not_finite(figures)
        if not wrong:
            return None
        self._finish_saving()
        what, most = f"step {completed + 1} has {' and '.join(wrong)}", self._settings.max_nonfinite
        if self._settings.on_nonfinite == "stop":
            message = _stopped(self._run, completed, what)
            raise DivergedError(f"{message}; train.on_nonfinite=skip goes on without such a batch", completed)
        if self._count == most:
            what += f", after {most} such steps, as many as train.max_nonfinite allows"
            raise DivergedError(_stopped(self._run, completed, what), completed)
        shown: dict[str, Any] = {"loss": str(figures["loss"]), "gradient_norm": str(figures["gradient_norm"])}
        if self._settings.on_nonfinite == "rollback":
            good = good_checkpoint(self._run, completed)
            if good is None:
                raise DivergedError(_stopped(self._run, completed, f"{what} and can't be rolled back"), completed)
            shown["checkpoint"] = step_of(good)
        self._count += 1
        return {"action": self._settings.on_nonfinite, **shown}


def good_checkpoint(run: RunFolder, num_steps: int) -> Path | None:
    """The newest checkpoint from before the weights after ``num_steps`` steps; ``None`` when there is none."""
    good = [path for path in checkpoints(run.checkpoints) if step_of(path) < num_steps]
    return good[-1] if good else None


def _not_finite(figures: Mapping[str, object]) -> list[str]:
    return [f"{name} {x}" for name, x in figures.items() if isinstance(x, float) and not math.isfinite(x)]


def _stopped(run: RunFolder, num_steps: int, what: str) -> str:
    good = good_checkpoint(run, num_steps)
    where = f"the last good checkpoint is {good}" if good else "there is no checkpoint from before it"
    advice = "A lower train.optimizer.learning_rate or a longer warm-up often helps"
    return f"{what}: training stopped; {where}. {advice}"


class RiseMonitor:
    """Whether the median of the last 25 training losses is more than 1 nat above the least such median so far.

    One spike does not move a median; a run that passes this mark is not worth its remaining steps. ``losses`` are those
    of the steps before, when a run is resumed.
    """

    def __init__(self, losses: Iterable[float] = ()):
        self._recent: deque[float] = deque(maxlen=MEDIAN_WINDOW)
        self._least = math.inf
        for loss in losses:
            self.add(loss)

    def add(self, loss: float) -> bool:
        """Note the loss of one more step and say whether the mark is passed."""
        self._recent.append(loss)
        if len(self._recent) < MEDIAN_WINDOW:
            return False
        median = statistics.median(self._recent)
        self._least = min(self._least, median)
        return median > self._least + LARGEST_RISE

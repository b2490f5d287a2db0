"""The end of a run whose figures are no longer finite, and the mark of one that lost what it had learned."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping

from gatelab.train.checkpoint import checkpoints, step_of
from gatelab.train.run_folder import RunFolder

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
    wrong = [f"{name} {x}" for name, x in figures.items() if isinstance(x, float) and not math.isfinite(x)]
    if not wrong:
        return
    good = [path for path in checkpoints(run.checkpoints) if step_of(path) < num_steps]
    where = f"the last good checkpoint is {good[-1]}" if good else "there is no checkpoint from before it"
    raise DivergedError(
        f"{what} has {' and '.join(wrong)}: training stopped; {where}. "
        "A lower train.optimizer.learning_rate or a longer warm-up often helps",
        num_steps,
    )


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

"""The end of a run whose figures are no longer finite."""

from __future__ import annotations

import math
from collections.abc import Mapping

from gatelab.train.checkpoint import checkpoints, step_of
from gatelab.train.run_folder import RunFolder


class DivergedError(ArithmeticError):
    """A loss, a gradient or a measured figure is not finite; nothing was updated with it."""


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
        "A lower train.optimizer.learning_rate or a longer warm-up often helps"
    )

"""Each arm's learning rate, chosen on validation text with seeds that are not compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean
from typing import NamedTuple

from gatelab.study.jobs import JobResult
from gatelab.study.study import Study

Losses = dict[float, list[float | None]]


class ChosenRate(NamedTuple):
    """An arm's rate, and the validation losses that it was chosen by: of each rate by tuning seed, in their order.

    A run that diverged has ``None``.
    """

    best: float
    losses: Losses

    def to_mapping(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {"best": self.best, "losses": [[rate, losses] for rate, losses in self.losses.items()]}


def choose_learning_rates(study: Study, results: Sequence[JobResult]) -> dict[str, ChosenRate]:
    """For each arm the rate with the least mean validation loss; one at which a seed diverged is never chosen.

    Raises ``ValueError``, which names all arms concerned, when an optimum is at the edge of the grid, where the true
    one may lie outside, or when every rate diverged.
    """
    chosen, complaints = {}, []
    for arm in study.arms:
        losses: Losses = {
            rate: [_loss(results, arm.name, rate, seed) for seed in study.tuning_seeds] for rate in study.learning_rates
        }
        best = min(losses, key=lambda rate: _mean(losses[rate]))
        chosen[arm.name] = ChosenRate(best, losses)
        complaint = _complaint(losses, best)
        if complaint:
            complaints.append(f"  {arm.name}: {complaint}")
    if complaints:
        way_out = "the grid of learning_rates holds no optimum of some arms; extend it, what was run is kept:"
        raise ValueError("\n".join([way_out, *complaints]))
    return chosen


def _loss(results: Sequence[JobResult], arm: str, rate: float, seed: int) -> float | None:
    return next(one.heldout_loss for one in results if (one.arm, one.learning_rate, one.seed) == (arm, rate, seed))


def _mean(losses: Sequence[float | None]) -> float:
    return mean(math.inf if loss is None else loss for loss in losses)


def _complaint(losses: Losses, best: float) -> str | None:
    lowest, highest = min(losses), max(losses)
    if math.isinf(_mean(losses[best])):
        return f"every rate diverged with some seed; add rates below {lowest:g}"
    if best == lowest:
        return f"the best rate is the lowest, {best:g}; add one below it"
    if best == highest:
        return f"the best rate is the highest, {best:g}; add one above it"
    return None

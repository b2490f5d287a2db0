"""Training on: what a run takes from the finished one whose weights it starts from."""

from __future__ import annotations

from pathlib import Path

from gatelab.train.settings import RunSettings, TrainSettings

RATE_SHARE = 0.1


def training_on(settings: TrainSettings, steps: int) -> TrainSettings:
    """How ``steps`` more steps are trained: as before, on batches in another order.

    The rates are those at which a cosine of the first run ends, a tenth where it ends at 0, through a warm-up of a
    tenth of the steps and down to a tenth. Evaluations and measurements are ten each. Where it starts is left open
    (:func:`started_from`).
    """
    changes = settings.to_mapping()
    optimizer, share = changes["optimizer"], settings.schedule.final_fraction or RATE_SHARE
    for rate in ("learning_rate", "gate_learning_rate"):
        optimizer[rate] = None if optimizer[rate] is None else optimizer[rate] * share
    changes["schedule"] = {"kind": "cosine", "warmup_steps": steps // 10, "final_fraction": RATE_SHARE}
    every = max(1, steps // 10)
    changes["evaluation"] |= {"every": every, "measure_every": every}
    changes["checkpoint"]["resume"] = "auto"
    changes |= {"steps": steps, "seed": settings.seed + 1, "start_from": None}
    return TrainSettings.parse(changes)


def started_from(settings: RunSettings, start: Path) -> RunSettings:
    """The same run from the weights in the folder ``start``."""
    return settings.model_copy(update={"train": settings.train.model_copy(update={"start_from": str(start)})})

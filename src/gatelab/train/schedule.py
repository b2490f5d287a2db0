"""The learning rate of each step."""

from __future__ import annotations

import math

from gatelab.train.settings import ScheduleSettings


def rate_factor(step: int, num_steps: int, settings: ScheduleSettings) -> float:
    """Learning rate of a step, from 0, as a share of the peak.

    Warm-up ends at the peak with its last step and starts at 1 / warmup_steps, never at zero; the last step of the run
    has exactly ``final_fraction``, unless nothing is left to decay. Phases may have no steps at all.
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    final = settings.final_fraction
    if settings.kind == "cosine":
        progress = (step + 1 - settings.warmup_steps) / (num_steps - settings.warmup_steps)
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
    decaying_since = step + 1 - (num_steps - settings.decay_steps)
    if decaying_since <= 0:
        return 1.0
    return final + (1 - final) * (1 - decaying_since / settings.decay_steps)

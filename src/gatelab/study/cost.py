"""What a study will cost, before its first run."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gatelab.model.accounting import count_parameters, flops_per_token_training
from gatelab.report.tables import Column, Table
from gatelab.study.study import Study
from gatelab.train.throughput import measure_peak

# Runs of 1 and of 4 million parameters on two cores with AVX-512 reached 0.19 to 0.33 of the peak.
PEAK_SHARE = 0.25
_TOTAL = "all"


class ArmCost(NamedTuple):
    """One arm: its model, its runs (tuning, then comparison), and what all its runs read and compute in training."""

    arm: str
    parameters: int
    tuning_runs: int
    comparison_runs: int
    tokens: int
    flops: float


def arm_costs(study: Study) -> list[ArmCost]:
    """Every arm's cost, the most it can be: each arm tuned to another rate than the baseline's, no run diverged."""
    costs = []
    for arm in study.arms:
        settings = study.settings_of(arm)
        tuning = len(study.learning_rates) * len(study.tuning_seeds)
        own_and_baselines = 2 if tuning and arm.name != study.baseline else 1
        comparison = own_and_baselines * len(study.seeds)
        tokens = (tuning + comparison) * settings.train.steps * settings.tokens_per_step
        flops_per_token = flops_per_token_training(settings.model, settings.data.context, settings.train.recompute)
        parameters = count_parameters(settings.model).total
        costs.append(ArmCost(arm.name, parameters, tuning, comparison, tokens, tokens * flops_per_token))
    return costs


def cost_table(
    study: Study, budget_hours: float | None = None, peak_flops: float | None = None, peak_share: float = PEAK_SHARE
) -> Table:
    """Runs, tokens, floating point operations and hours on this machine by arm, with a last row for all of them.

    The hours are operations over ``peak_share`` of ``peak_flops``, this machine's matrix product when ``None``
    (:func:`gatelab.train.throughput.measure_peak`, at the study's precision); evaluation, measuring and the preparation
    of the text come on top. Raises ``ValueError`` when they exceed ``budget_hours``.
    """
    costs = arm_costs(study)
    precision = study.settings_of(study.arm(study.baseline)).train.precision
    peak = measure_peak(getattr(torch, precision)) if peak_flops is None else peak_flops
    per_hour = 3600 * peak_share * peak
    hours = sum(cost.flops for cost in costs) / per_hour
    if budget_hours is not None and hours > budget_hours:
        scale = f" at scale {study.scale}" if study.scale else ""
        raise ValueError(
            f"study {study.name}{scale} takes about {hours:,.1f} hours on this machine, more than the budget of "
            f"{budget_hours:g}; choose a smaller scale, fewer seeds or a larger budget"
        )
    baseline = next(cost.parameters for cost in costs if cost.arm == study.baseline)
    rows = [
        {**cost._asdict(), "surplus": cost.parameters / baseline - 1, "hours": cost.flops / per_hour} for cost in costs
    ]
    summed = ("tuning_runs", "comparison_runs", "tokens", "flops", "hours")
    total = {"arm": _TOTAL, **{key: sum(row[key] for row in rows) for key in summed}}
    return Table(_COLUMNS, [*rows, total], _caption(peak, peak_share, precision))


_COLUMNS = (
    Column("arm", "arm"),
    Column("parameters", "parameters", ",d"),
    Column("surplus", "against the baseline", "+.2%"),
    Column("tuning_runs", "tuning runs", "d"),
    Column("comparison_runs", "comparison runs", "d"),
    Column("tokens", "tokens", ",d"),
    Column("flops", "training FLOPs", ".2e"),
    Column("hours", "hours", ",.2f"),
)


def _caption(peak: float, peak_share: float, precision: str) -> str:
    return (
        f"Hours at {peak_share:.0%} of this machine's matrix product in {precision}, {peak / 1e9:,.0f} GFLOP/s; "
        "evaluation comes on top."
    )

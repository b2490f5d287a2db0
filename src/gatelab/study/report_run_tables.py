"""The tables of a study's report that are about runs: inside the models, learning rates, stability, cost, files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import numpy as np

from gatelab.report.progress import duration
from gatelab.report.tables import Column, Linked, Table
from gatelab.study.findings import LOSS, Findings, Quantity, mean_over_seeds
from gatelab.study.jobs import DIVERGED, JobResult
from gatelab.study.report_tables import mean_cell, plus_minus
from gatelab.study.run_curves import RunCurve
from gatelab.study.runner import CONDITIONS
from gatelab.study.statistics import learning_rate_sensitivity

_ARM = Column("arm", "arm")
Cells = dict[str, Any]


def inside_table(findings: Findings, quantities: Sequence[Quantity], caption: str) -> Table | None:
    """Means over seeds with half-widths for each arm, and what uniform attention gives in a last row."""
    if not quantities:
        return None
    columns = [_ARM, *(Column(one.key, one.title, align="right") for one in quantities)]
    rows = [
        {"arm": arm, **{one.key: _mean_cell(one, runs) for one in quantities}}
        for arm, runs in findings.compared.items()
        if runs
    ]
    floors = {one.key: _range_text(findings.floors(one), one.format) for one in quantities}
    if any(floors.values()):
        rows.append({"arm": "uniform attention", **floors})
    has_widths = any(len(runs) > 1 for runs in findings.compared.values())
    widths = " Mean over seeds, with the half-width of a 95 % t interval." if has_widths else " One seed."
    return Table(columns, rows, caption + widths) if rows else None


def rate_table(findings: Findings) -> Table | None:
    """Validation losses of each arm over the grid, its best rate, and what another rate costs."""
    study = findings.study
    tuned = [one for one in findings.results if one.purpose == "tuning"]
    if not tuned:
        return None
    rows = []
    for arm in study.arms:
        row: Cells = {"arm": arm.name, "best": (findings.rates or {}).get(arm.name)}
        of_arm = [one for one in tuned if one.arm == arm.name]
        for number, rate in enumerate(study.learning_rates):
            losses = [one.heldout_loss for one in of_arm if one.learning_rate == rate]
            finite = [loss for loss in losses if loss is not None]
            diverged = f"{len(losses) - len(finite)} of {len(losses)} diverged"
            row[f"rate_{number}"] = mean(finite) if len(finite) == len(losses) > 0 else diverged if losses else None
        if len(of_arm) == len(study.learning_rates) * len(study.tuning_seeds):
            row["sensitivity"] = _sensitivity(findings, of_arm)
        rows.append(row)
    columns = [
        _ARM,
        Column("best", "own rate", "g"),
        Column("sensitivity", "sensitivity", align="right"),
        *(Column(f"rate_{number}", f"{rate:g}", ".4f") for number, rate in enumerate(study.learning_rates)),
    ]
    caption = (
        "Mean validation loss (nats per token) of the tuning seeds at each rate. Sensitivity (Wortsman et al. "
        "2309.14322): how much loss another rate of the grid costs on average, a diverged run counted as the loss of "
        "an untrained model, ln V."
    )
    return Table(columns, rows, caption)


def _sensitivity(findings: Findings, results: Sequence[JobResult]) -> str:
    study = findings.study
    by_rate = {(one.learning_rate, one.seed): one.heldout_loss for one in results}
    losses = np.array(
        [
            [math.nan if (loss := by_rate[rate, seed]) is None else loss for seed in study.tuning_seeds]
            for rate in study.learning_rates
        ]
    )
    untrained = math.log(study.settings_of(study.arm(results[0].arm)).model.vocab_size)
    found = mean_over_seeds(learning_rate_sensitivity(losses, untrained).tolist())
    assert found is not None
    return plus_minus(found, ".4f")


def stability_table(findings: Findings, curves: Sequence[RunCurve]) -> Table | None:
    """Divergence and loss spikes by arm, over the compared runs; the runs that tuned count in the first alone."""
    rows = []
    for arm in findings.study.arms:
        of_arm = [one for one in findings.results if one.arm == arm.name]
        spikes = [one.loss_spikes for one in curves if one.arm == arm.name and one.loss_spikes is not None]
        if not of_arm:
            continue
        diverged = [one for one in of_arm if one.diverged_at is not None]
        steps = ", ".join(
            f"{one.diverged_at:,}" + ("" if one.learning_rate is None else f" (rate {one.learning_rate:g})")
            for one in diverged
        )
        found = {"runs": len(of_arm), "diverged": len(diverged), "steps": steps or None}
        rows.append({"arm": arm.name, **found, "spikes": sum(spikes) if spikes else None})
    columns = [
        _ARM,
        Column("runs", "finished runs", "d"),
        Column("diverged", "diverged", "d"),
        Column("steps", "after step"),
        Column("spikes", "loss spikes", "d"),
    ]
    caption = (
        "A run diverged when a figure was not finite or its trailing median loss rose by more than 1 nat. A spike is a "
        "step after the 2,000th more than 0.1 nats over the running median of 101, over all compared runs."
    )
    return Table(columns, rows, caption) if rows else None


def events_table(curves: Sequence[RunCurve]) -> Table | None:
    """Every step of a compared run that was not finite and was passed over; ``None`` when there was none."""
    rows = [
        {
            "arm": curve.arm,
            "seed": str(curve.seed),
            "step": event["step"],
            "loss": event["loss"],
            "norm": event["gradient_norm"],
            "action": event["action"],
            "checkpoint": event.get("checkpoint"),
        }
        for curve in curves
        for event in curve.events
    ]
    columns = [
        _ARM,
        Column("seed", "seed", align="right"),
        Column("step", "step", ",d"),
        Column("loss", "loss", align="right"),
        Column("norm", "gradient norm", align="right"),
        Column("action", "action"),
        Column("checkpoint", "back to step", ",d"),
    ]
    caption = "Steps whose loss or gradient norm was not finite: the update is left out (train.on_nonfinite)."
    return Table(columns, rows, caption) if rows else None


def cost_so_far(findings: Findings) -> Table | None:
    """What the finished runs read, computed and took, with a last row for all of them."""
    columns = [
        _ARM,
        *([Column("tuning", "tuning runs", "d")] if findings.study.learning_rates else []),
        Column("comparison", "compared runs", "d"),
        Column("tokens", "tokens", ",d"),
        Column("flops", "training FLOPs", ".2e"),
        Column("hours", "hours of training", ",.2f"),
    ]
    names = [arm.name for arm in findings.study.arms]
    rows = []
    for name, of_arm in [
        *((name, [one for one in findings.results if one.arm == name]) for name in names),
        ("all", list(findings.results)),
    ]:
        counts = {kind: sum(one.purpose == kind for one in of_arm) for kind in ("tuning", "comparison")}
        sums = {"tokens": sum(one.tokens for one in of_arm), "flops": sum(one.flops for one in of_arm)}
        rows.append({"arm": name, **counts, **sums, "hours": sum(one.seconds for one in of_arm) / 3600})
    return Table(columns, rows, "Finished runs. Evaluation and measuring come on top.") if findings.results else None


def runs_table(findings: Findings, curves: Sequence[RunCurve]) -> Table:
    """Every finished run; each number links to the file that holds it."""
    metric, spikes = findings.metric, {(one.arm, one.seed): one.loss_spikes for one in curves}
    rows = []
    for one in findings.results:
        result = f"{one.folder}/result.json"
        row: Cells = {
            "arm": Linked(one.arm, f"{one.folder}/settings.yaml"),
            "seed": str(one.seed),
            "rate": one.learning_rate,
            "purpose": one.purpose,
            "seconds": duration(one.seconds),
        }
        if one.diverged_at is not None:
            row["diverged"] = Linked(f"after step {one.diverged_at:,}", f"{one.folder}/{DIVERGED}")
        else:
            shown = {"loss": one.heldout_loss, "metric": metric.of(one)}
            row |= {key: Linked(value, result) for key, value in shown.items() if value is not None}
        counted = spikes.get((one.arm, one.seed))
        if one.purpose == "comparison" and counted is not None:
            row["spikes"] = Linked(counted, f"{one.folder}/metrics.jsonl")
        rows.append(row)
    columns = [
        _ARM,
        Column("seed", "seed", align="right"),
        *([Column("rate", "rate", "g"), Column("purpose", "purpose")] if findings.study.learning_rates else []),
        Column("loss", "held-out loss", ".4f"),
        *([Column("metric", metric.title, metric.format)] if metric.key != LOSS else []),
        Column("spikes", "spikes", "d"),
        Column("diverged", "diverged"),
        Column("seconds", "wall time", align="right"),
    ]
    caption = "Each number links to the file that holds it, each arm to the settings that run it again."
    return Table(columns, rows, caption)


def differences_table(findings: Findings) -> Table | None:
    """What each arm declares, and every setting in which it is not the baseline."""
    rows = [
        {
            "arm": Linked(one.arm, CONDITIONS),
            "words": " ".join(findings.study.arm(one.arm).assignments) or None,
            "changes": _changes(one.differences),
        }
        for one in findings.conditions
        if one.differences
    ]
    columns = [_ARM, Column("words", "declares"), Column("changes", "settings that differ")]
    caption = f"From {findings.study.baseline} to each arm; nothing else differs."
    return Table(columns, rows, caption) if rows else None


def _changes(differences: Mapping[str, Sequence[Any]]) -> str:
    """All differences in words; of a record that the baseline has not, its fields together."""
    by_record: dict[str, list[str]] = {}
    for path, (before, now) in differences.items():
        record, _, field = path.rpartition(".")
        fields = [values for other, values in differences.items() if other.startswith(f"{record}.")]
        if len(fields) > 1 and all(was is None for was, _ in fields):
            by_record.setdefault(record, []).append(f"{field} {_plain(now)}")
        else:
            by_record[path] = [f"{_plain(before)} → {_plain(now)}"]
    return "; ".join(f"{path}: {', '.join(texts)}" for path, texts in by_record.items())


def _mean_cell(quantity: Quantity, runs: Sequence[JobResult]) -> Linked | None:
    return mean_cell(mean_over_seeds([quantity.of(one) for one in runs]), quantity.format)


def _range_text(floors: Sequence[float], format: str) -> str | None:
    """The least and the greatest of ascending values."""
    return " to ".join(f"{one:{format}}" for one in dict.fromkeys([*floors[:1], *floors[-1:]])) or None


def _plain(value: object) -> str:
    return "not set" if value is None else str(value)

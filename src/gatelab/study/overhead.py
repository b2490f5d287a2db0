"""What a training step of each arm costs in wall time: all arms in one process, in turns.

Machines drift by more than a gate costs, so separate runs can't be compared. Here every arm takes one step in each
round, in an order drawn anew, and an arm's cost is the median over rounds of its step's time over the baseline's in
the same round. The interval around it is that of order statistics, which supposes nothing of how times are spread.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import bdtr

from gatelab.data.loader import Batch
from gatelab.files import write_atomically
from gatelab.model.accounting import count_parameters, flops_per_token_training
from gatelab.report.charts import Reference, dot_interval_chart
from gatelab.report.page import Figure, Page, Section
from gatelab.report.tables import Column, Table
from gatelab.study.statistics import LEVEL, Estimate
from gatelab.study.study import Study
from gatelab.train.loop import build
from gatelab.train.optimizer import build_optimizer
from gatelab.train.parallel.process import deterministic_kernels
from gatelab.train.run_folder import describe_environment
from gatelab.train.settings import RunSettings
from gatelab.train.step import take_step

TIMES = "step_times.json"
WARM_UP_ROUNDS = 3
MIN_ROUNDS = 6
_RATIO = Column("ratio", "time ratio", ".3f")


class StepTimes(NamedTuple):
    """One arm's measured steps: ``flops`` floating point operations and ``seconds`` of each, round by round."""

    arm: str
    parameters: int
    flops: float
    seconds: list[float]


class Overhead(NamedTuple):
    """A finished measurement."""

    study: Study
    environment: dict[str, Any]
    arms: list[StepTimes]


def measure_overhead(study: Study, folder: Path, watch: Callable[[int, int], None] = lambda done, of: None) -> Overhead:
    """Time ``train.steps`` rounds of every arm and write them to ``step_times.json``; what is there is not repeated.

    Batches are random tokens. ``watch`` is told the finished rounds and their number. Raises ``ValueError`` where the
    arms differ in precision or steps, for fewer than 6 rounds, and for a folder that holds another study's times.
    """
    file = folder / TIMES
    if file.exists():
        found = read_overhead(folder)
        if found.study != study:
            raise ValueError(f"{file} holds the times of other arms or settings; choose another folder")
        return found
    runs = {arm.name: study.settings_of(arm, study.seeds[0]) for arm in study.arms}
    _require_comparable(study, list(runs.values()))
    steppers = {name: _stepper(run) for name, run in runs.items()}
    num_rounds = runs[study.baseline].train.steps
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    draw = random.Random(study.seeds[0])
    for number in range(-WARM_UP_ROUNDS, num_rounds):
        for name in draw.sample(list(steppers), len(steppers)):
            began = time.perf_counter()
            steppers[name]()
            if number >= 0:
                seconds[name].append(time.perf_counter() - began)
        watch(max(number + 1, 0), num_rounds)
    measured = [_times(name, run, seconds[name]) for name, run in runs.items()]
    overhead = Overhead(study, describe_environment(runs[study.baseline].train.compile), measured)
    content = {
        "study": study.to_mapping(),
        "environment": overhead.environment,
        "arms": [times._asdict() for times in measured],
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(content, indent=1) + "\n")
    return overhead


def read_overhead(folder: Path) -> Overhead:
    """The measurement that a folder holds."""
    file = folder / TIMES
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        arms = [StepTimes(**times) for times in content["arms"]]
        return Overhead(Study.parse(content["study"]), content["environment"], arms)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is unreadable ({error}); delete it to measure again") from None


def median_ratio(arm: list[float], baseline: list[float]) -> Estimate:
    """The median of the ratios of paired times, between the order statistics that hold it in 95 of 100 studies.

    Ranks k and S + 1 - k with the largest k for which a binomial of S halves is below k at most LEVEL / 2 of the time.
    Needs 6 pairs.
    """
    assert len(arm) == len(baseline) >= MIN_ROUNDS
    ratios = np.sort(np.array(arm) / np.array(baseline))
    number = len(ratios)
    ranks = np.arange(number)
    below = int(np.searchsorted(bdtr(ranks, number, 0.5), LEVEL / 2, side="right"))
    return Estimate(float(np.median(ratios)), float(ratios[below - 1]), float(ratios[number - below]))


def overhead_rows(overhead: Overhead) -> list[dict[str, Any]]:
    """A row for each arm: parameters, operations and time of a step, and both as ratios to the baseline's."""
    base = next(times for times in overhead.arms if times.arm == overhead.study.baseline)
    rows = []
    for times in overhead.arms:
        ratio = median_ratio(times.seconds, base.seconds)
        rows.append(
            {
                "arm": times.arm,
                "parameters": times.parameters,
                "flops": times.flops / base.flops,
                "milliseconds": 1e3 * float(np.median(times.seconds)),
                "ratio": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
            }
        )
    return rows


def overhead_table(overhead: Overhead) -> Table:
    """The rows of :func:`overhead_rows`."""
    columns = [
        Column("arm", "arm"),
        Column("parameters", "params", ",d"),
        Column("flops", "FLOPs ratio", ".4f"),
        Column("milliseconds", "ms", ".1f"),
        _RATIO,
        Column("low", "from", ".3f"),
        Column("high", "to", ".3f"),
    ]
    num_rounds = len(overhead.arms[0].seconds)
    return Table(
        columns,
        overhead_rows(overhead),
        f"Median step of {num_rounds} rounds, arms in turns, and its ratio to the baseline's with a 95 % interval.",
    )


def overhead_page(overhead: Overhead, command: str) -> Page:
    """The report, with every number from ``step_times.json``."""
    table = overhead_table(overhead)
    base = overhead.study.baseline
    rows = [row for row in table.rows if row["arm"] != base]
    lead = "; ".join(f"{row['arm']} {row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]" for row in rows)
    chart = dot_interval_chart(
        rows,
        Column("arm", "arm"),
        _RATIO,
        ("low", "high"),
        "Wall time of a training step",
        reference=Reference(base, 1.0),
    )
    figure = Figure(chart, f"Time of a step as a ratio to {base}'s.", __doc__ or "", table.caption)
    run = overhead.study.settings_of(overhead.study.arm(base))
    text = (
        f"{run.train.sequences_per_step} sequences of {run.data.context} random tokens, {run.train.precision}, "
        f"{overhead.environment['threads']} threads. All times: {TIMES}."
    )
    return Page(
        title=f"Study: {overhead.study.name}",
        lead=f"{overhead.study.question} Medians with 95 % intervals: {lead}.",
        command=command,
        sections=[Section("Time of a step", text, [table, figure])],
        environment=overhead.environment,
    )


def _require_comparable(study: Study, runs: list[RunSettings]) -> None:
    for path, values in {
        "train.precision": {run.train.precision for run in runs},
        "train.steps": {run.train.steps for run in runs},
    }.items():
        if len(values) > 1:
            raise ValueError(f"study {study.name} times its arms in turns, and {path} differs between them: {values}")
    if runs[0].train.steps < MIN_ROUNDS:
        raise ValueError(
            f"train.steps={runs[0].train.steps} rounds give no interval of a median; take {MIN_ROUNDS} or more"
        )


def _stepper(run: RunSettings) -> Callable[[], object]:
    """One training step on random tokens."""
    decoder, sum_of_nats = build(run, run.train.compile)
    optimizer = build_optimizer(decoder, run.train.optimizer)
    generator = torch.Generator().manual_seed(run.train.seed)
    size = (run.train.sequences_per_step, run.data.context + 1)
    ids = torch.randint(run.model.vocab_size, size, generator=generator)
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())

    def step() -> None:
        with deterministic_kernels(run.train.deterministic):
            take_step(decoder, optimizer, batch, sum_of_nats, run.train)

    return step


def _times(name: str, run: RunSettings, seconds: list[float]) -> StepTimes:
    per_token = flops_per_token_training(run.model, run.data.context, run.train.recompute)
    return StepTimes(name, count_parameters(run.model).total, per_token * run.tokens_per_step, seconds)

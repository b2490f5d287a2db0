"""The tables of a study's report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean
from typing import Any

from gatelab.report.progress import duration
from gatelab.report.tables import Column, Linked, Table
from gatelab.study.findings import LOSS, Comparison, Findings, Quantity, compare, mean_over_seeds
from gatelab.study.jobs import JobResult
from gatelab.study.statistics import Estimate
from gatelab.study.study import LOGITS_ERROR, PROBES, QUANTISATION_COST

COMPARISONS = "comparisons.json"
T_INTERVALS = "Intervals: Student's t over seeds of the paired differences, each at 95 % by itself."
PROBED_BY = {QUANTISATION_COST: "scheme", LOGITS_ERROR.partition("[")[0]: "dtypes"}
_ARM = Column("arm", "arm")
Cells = dict[str, Any]


def result_table(findings: Findings) -> Table:
    """A row for each arm: the metric, its difference from the baseline, the verdict, the paper's difference beside."""
    study, metric = findings.study, findings.metric
    has_paper = any(findings.paper_difference(arm.name, metric) is not None for arm in study.arms)
    columns = [
        _ARM,
        *_seeds_column(findings),
        Column("mean", "mean", metric.format),
        Column("difference", "difference", f"+{metric.format}"),
        Column("interval", "95 %", f"+{metric.format}"),
        Column("verdict", "verdict"),
        *([Column("paper", "paper", "+.3f"), Column("direction", "direction")] if has_paper else []),
    ]
    rows = [_result_row(findings, arm.name) for arm in study.arms]
    return Table(columns, rows, _result_caption(findings, has_paper))


def _seeds_column(findings: Findings) -> list[Column]:
    """How many seeds each arm has, until all have all."""
    num_seeds = len(findings.study.seeds)
    is_whole = all(len(runs) == num_seeds for runs in findings.compared.values())
    return [] if is_whole else [Column("seeds", "seeds", align="right")]


def _seeds_cell(findings: Findings, arm: str) -> str:
    return f"{len(findings.compared[arm])} of {len(findings.study.seeds)}"


def _result_row(findings: Findings, arm: str) -> Cells:
    study, metric, runs = findings.study, findings.metric, findings.compared[arm]
    comparison, of_paper = findings.comparisons.get(arm), findings.paper_difference(arm, metric)
    row: Cells = {"arm": arm, "seeds": _seeds_cell(findings, arm), "verdict": verdict(findings, arm)}
    row |= {"mean": _mean_cell(metric, runs), **_difference(comparison)}
    if arm != study.baseline:
        row |= {"paper": of_paper, "direction": None if comparison is None else comparison.direction(of_paper)}
    return row


def verdict(findings: Findings, arm: str) -> str:
    """The verdict on an arm in a few words, or why it has none."""
    study, comparison = findings.study, findings.comparisons.get(arm)
    if arm == study.baseline:
        return "baseline"
    if comparison is None or comparison.num_pairs == 0:
        return "not finished"
    if comparison.contrast is None:
        return "one seed: no verdict"
    if comparison.is_judged or comparison.contrast.num_diverged:
        return comparison.contrast.sentence()
    return "not before all seeds are done" if arm in study.confirmatory else "exploratory"


def _result_caption(findings: Findings, has_paper: bool) -> str:
    metric, overs = findings.metric, {one.over for one in findings.comparisons.values()}
    unit = " in nats per token" if metric.key == LOSS else ""
    better = "; lower is better" if metric.is_lower_better else ""
    parts = [f"{metric.title[0].upper()}{metric.title[1:]}{unit}, mean over {_count(findings)}{better}."]
    if "seeds" in overs:
        parts.append(T_INTERVALS)
    if "documents" in overs:
        parts.append(
            "Where there is one seed, the interval is a bootstrap over the held-out documents: it says how far the "
            "choice of text moves the difference, and nothing about other seeds."
        )
    if has_paper:
        kind = "ln of the ratio of its perplexities" if metric.key == LOSS else "its table 4, over all queries"
        parts.append(f"The paper's difference: {kind}, of models that are far larger.")
    return " ".join(parts)


def _count(findings: Findings) -> str:
    num_seeds = len(findings.study.seeds)
    return "one seed" if num_seeds == 1 else f"{num_seeds} seeds"


def probed_tables(findings: Findings) -> list[Table]:
    """What rounding and bfloat16 do to the arms' runs, a table for each kind of probe; not the study's own metric."""
    probed = [one for one in findings.quantities if one.key in PROBES and one.key != findings.metric.key]
    kinds = [[one for one in probed if one.name == name] for name in PROBED_BY]
    return [_probed_table(findings, quantities) for quantities in kinds if quantities]


def _probed_table(findings: Findings, quantities: Sequence[Quantity]) -> Table:
    rows = []
    for quantity in quantities:
        comparisons, by = findings.in_quantity(quantity), quantity.key.partition("[")[2].removesuffix("]")
        for arm, runs in findings.compared.items():
            row: Cells = {"by": by, "arm": arm, "seeds": _seeds_cell(findings, arm)}
            rows.append(row | {"mean": _mean_cell(quantity, runs), **_difference(comparisons.get(arm))})
    kind = quantities[0]
    columns = [
        Column("by", PROBED_BY[kind.name]),
        _ARM,
        *_seeds_column(findings),
        Column("mean", "mean", kind.format),
    ]
    title = kind.title.partition(",")[0]
    caption = f"{title[0].upper()}{title[1:]}, mean over {_count(findings)}; lower is better."
    if any("interval" in row for row in rows):
        columns += [
            Column("difference", "difference", f"+{kind.format}"),
            Column("interval", "95 %", f"+{kind.format}"),
        ]
        caption += f" Differences are from {findings.study.baseline}. {T_INTERVALS}"
    return Table(columns, rows, caption)


def size_table(findings: Findings) -> Table | None:
    """Parameters, operations and wall time of each arm's runs, side by side."""
    base = _finished(findings.compared[findings.study.baseline])
    rows = []
    for arm, of_arm in findings.compared.items():
        runs = _finished(of_arm)
        if not runs:
            continue
        sizes = {"parameters": runs[0].parameters, "flops": runs[0].flops}
        row: Cells = {"arm": arm, **sizes, "seconds": duration(mean(one.seconds for one in runs))}
        if base:
            row |= {f"{key}_more": size / getattr(base[0], key) - 1 for key, size in sizes.items()}
            row["seconds_more"] = mean(one.seconds for one in runs) / mean(one.seconds for one in base) - 1
        rows.append(row)
    columns = [
        _ARM,
        Column("parameters", "parameters", ",d"),
        Column("parameters_more", "more", "+.2%"),
        Column("flops", "training FLOPs", ".2e"),
        Column("flops_more", "more", "+.2%"),
        Column("seconds", "wall time", align="right"),
        Column("seconds_more", "more", "+.0%"),
    ]
    caption = (
        "One run of each arm, and how much more that is than the baseline's. Wall time is that of training, mean over "
        "seeds; runs may have shared the machine."
    )
    return Table(columns, rows, caption) if rows else None


def equal_rate_table(findings: Findings) -> Table | None:
    """Arms at the baseline's rate, where they have others of their own."""
    runs, metric = findings.at_equal_rate, findings.metric
    if runs is None or findings.rates is None:
        return None
    found, rate = compare(findings.study, runs, metric.of), findings.rates[findings.study.baseline]
    columns = [
        _ARM,
        Column("own", "own learning rate", "g"),
        Column("mean", metric.title, metric.format),
        Column("difference", "difference", f"+{metric.format}"),
        Column("interval", "95 %", f"+{metric.format}"),
    ]
    rows = [
        {"arm": arm, "own": findings.rates[arm], "mean": _mean_cell(metric, of_arm), **_difference(found.get(arm))}
        for arm, of_arm in runs.items()
    ]
    return Table(columns, rows, f"All arms at the baseline's learning rate, {rate:g}; exploratory, without a verdict.")


def power_table(findings: Findings) -> Table | None:
    """What the seeds can tell: spread of the differences, correlation between paired arms, detectable difference."""
    rows = []
    for arm, comparison in findings.comparisons.items():
        contrast = comparison.contrast
        if contrast is None or contrast.seeds is None:
            continue
        seeds, detectable = contrast.seeds, contrast.detectable
        row: Cells = {"arm": arm, "seeds": seeds.num_seeds, "deviation": seeds.standard_deviation}
        if seeds.correlation is not None:
            row |= {"correlation": seeds.correlation.value, "correlation_interval": _interval(seeds.correlation)}
        if detectable is not None:
            row |= {"detectable": detectable.value, "detectable_interval": _interval(detectable)}
        rows.append(row)
    metric = findings.metric
    columns = [
        _ARM,
        Column("deviation", "deviation", metric.format),
        Column("correlation", "correlation", "+.2f"),
        Column("correlation_interval", "95 %", "+.2f"),
        Column("detectable", "detectable", metric.format),
        Column("detectable_interval", "95 %", metric.format),
    ]
    caption = (
        "Standard deviation of the paired differences; correlation of the two arms over the seeds, which is what "
        "pairing lives on; and the true difference that would be found with a chance of 80 % at that deviation."
    )
    return Table(columns, rows, caption) if rows else None


def verdict_table(findings: Findings) -> Table | None:
    """The declared contrasts, judged together."""
    study, metric = findings.study, findings.metric
    rows = []
    for arm, comparison in findings.comparisons.items():
        judgement = None if comparison.contrast is None else comparison.contrast.judgement
        if judgement is not None:
            row: Cells = {"arm": arm, "verdict": verdict(findings, arm)}
            row["interval"] = None if judgement.interval is None else _interval(judgement.interval)
            rows.append(row | {"different": judgement.p_value, "equal": judgement.p_value_of_equality})
    columns = [
        _ARM,
        Column("verdict", "verdict"),
        Column("interval", "simultaneous interval", f"+{metric.format}"),
        Column("different", "p, no difference", ".2g"),
        Column("equal", "p, d or more", ".2g"),
    ]
    caption = (
        f"Contrasts declared in advance: {len(study.confirmatory)}. p-values, of no difference and of one that is at "
        "least d, the smallest that matters, are adjusted by Holm; the intervals hold together at 95 %."
    )
    return Table(columns, rows, caption) if rows else None


def paper_tables(findings: Findings) -> list[Table]:
    """The paper's figures beside ours: a table for each kind of figure that both have."""
    return [table for one in findings.quantities if (table := _paper_table(findings, one)) is not None]


def _paper_table(findings: Findings, quantity: Quantity) -> Table | None:
    comparisons, rows = findings.in_quantity(quantity), []
    for arm in findings.study.arms:
        row, ours = findings.paper_row(arm.name), _mean_cell(quantity, findings.compared[arm.name])
        of_paper = None if row is None or quantity.is_of_part else quantity.paper(row)
        if of_paper is None or ours is None:
            continue
        cells: Cells = {"arm": arm.name, "paper": of_paper, "ours": ours}
        cells["row"] = (arm.paper or "").replace(" ", "\u00a0")
        if arm.name != findings.study.baseline:
            difference, comparison = findings.paper_difference(arm.name, quantity), comparisons.get(arm.name)
            cells["paper_difference"] = difference
            cells |= _difference(comparison)
            cells["direction"] = None if comparison is None else comparison.direction(difference)
        rows.append(cells)
    of_paper = ",.0f" if quantity.format == ",.1f" else ".3f"
    columns = [
        _ARM,
        Column("paper", "paper", of_paper),
        Column("paper_difference", "difference", f"+{of_paper}"),
        Column("ours", "ours", quantity.format),
        Column("difference", "difference", f"+{quantity.format}"),
        Column("interval", "95 %", f"+{quantity.format}"),
        Column("direction", "direction"),
        Column("row", "its row"),
    ]
    columns = [column for column in columns if any(row.get(column.key) is not None for row in rows)]
    title = f"{quantity.title[0].upper()}{quantity.title[1:]}"
    unit = ", nats per token (the paper's: ln of its perplexity)" if quantity.key == LOSS else ""
    return Table(columns, rows, f"{title}{unit}.") if len(rows) > 1 or (rows and quantity.key == "gate_mean") else None


def _finished(runs: Sequence[JobResult]) -> list[JobResult]:
    return [one for one in runs if one.diverged_at is None]


def _mean_cell(quantity: Quantity, runs: Sequence[JobResult]) -> Linked | None:
    found = mean_over_seeds([quantity.of(one) for one in runs])
    return None if found is None else Linked(found.value, COMPARISONS)


def _interval(estimate: Estimate) -> tuple[float, float]:
    return estimate.low, estimate.high


def estimate_cells(key: str, estimate: Estimate | None) -> Cells:
    """The cells of an estimate, its value and its interval; none without one."""
    if estimate is None:
        return {}
    interval = None if math.isnan(estimate.low) else _interval(estimate)
    return {key: Linked(estimate.value, COMPARISONS), f"{key}_interval": interval}


def mean_cell(estimate: Estimate | None, format: str) -> Linked | None:
    """A mean with the half-width of its interval."""
    return None if estimate is None else Linked(plus_minus(estimate, format), COMPARISONS)


def plus_minus(found: Estimate, format: str) -> str:
    """A value and the half-width of its interval, where it has one."""
    value = f"{found.value:{format}}"
    return value if math.isnan(found.high) else f"{value} ± {found.high - found.value:{format}}"


def _difference(comparison: Comparison | None) -> Cells:
    """The cells of a difference and its interval; none without one."""
    if comparison is None or comparison.difference is None:
        return {}
    difference = comparison.difference
    return {"difference": Linked(difference.value, COMPARISONS), "interval": _interval(difference)}

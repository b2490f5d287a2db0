"""The report on pruning: tidy rows, one page, and the files beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from gatelab.evaluate.intervals import mean_interval
from gatelab.longcontext.kv_pruning.judge import METRICS, Verdict
from gatelab.longcontext.kv_pruning.trial import ANSWERS, DECODING, FOUND, LOSS, PREFILL, Arm
from gatelab.report.charts import Reference, line_chart
from gatelab.report.folder import to_csv, write_report
from gatelab.report.page import Figure, Page, Section
from gatelab.report.tables import Column, Table

SCHEMA_VERSION = 1
FILES = ("pruning.json", "pruning.csv", "samples.csv")
COLUMNS = ("model", "press", "allocation", "use", "budget", "keys", "metric", "mean", "low", "high", "samples")
SAMPLE_COLUMNS = ("model", "press", "allocation", "use", "budget", "sample", "metric", "value")
USES = {
    PREFILL: "Prefill compression: the context is read whole, its cache is cut once, all later keys stay.",
    DECODING: "Decoding eviction: tokens come a few at a time, and the cache is cut to the budget after each step.",
}
ABLATIONS = (("gated_attention", "attention_value"), ("self_gate", "random"))
"""Presses that look at gates, each with the press that it is without them."""
ANSWERS_TEXT = (
    "Small retrieval tasks in the manner of RULER, which are not RULER's: references found, in percent. The prompt "
    "without its last token is read before the cut; the last token's key and those of the answer all stay."
)
INTERVALS_TEXT = (
    "Means over samples with 95 % t intervals. All ways saw the same samples, so two of them may differ surely though "
    "their intervals overlap: compare their samples in pairs, from samples.csv."
)
DEFINITION = (
    "Mean over the continuation's predictions, all but the first; then over samples, with the 95 % t interval over "
    "samples. The budget is the share of the context's keys that a key/value head keeps on average. Every press keeps "
    "the newest keys, up to half of the budget. Keys keep the rotation of their place in the text."
)


def figure_rows(verdict: Verdict) -> list[dict[str, Any]]:
    """One row for each arm, use, budget and metric: the mean over samples with its interval.

    ``keys`` are those of a head on average; ``None`` for the mini tasks, whose prompts are not equally long.
    """
    rows = []
    for arm, use, budget, metric in dict.fromkeys((*score[:3], score.metric) for score in verdict.scores):
        values = verdict.values(arm, use, budget, metric)
        keys = None if use == ANSWERS else verdict.trial.keys_at(budget)
        where = {"use": use, "budget": budget, "keys": keys, "metric": metric}
        interval = mean_interval(values)
        rows.append(
            {"model": verdict.name, **arm._asdict(), "label": arm.label, **where}
            | interval._asdict()
            | {"interval": interval.ends, "samples": len(values)}
        )
    return rows


def ablation_rows(verdict: Verdict) -> list[dict[str, Any]]:
    """What gates add: each gated way minus the same without gates, paired by sample; negative is better."""
    rows = []
    for arm, plain in _pairs(verdict.trial.arms):
        for use in USES:
            for budget in verdict.trial.budgets:
                pairs = zip(
                    verdict.values(arm, use, budget, LOSS), verdict.values(plain, use, budget, LOSS), strict=True
                )
                if differences := [one - other for one, other in pairs]:
                    interval = mean_interval(differences)
                    rows.append(
                        {"pair": f"{arm.label} - {plain.label}", "use": use, "budget": budget}
                        | interval._asdict()
                        | {"interval": interval.ends}
                    )
    return rows


def _pairs(arms: Sequence[Arm]) -> Iterator[tuple[Arm, Arm]]:
    for arm in arms:
        for gated, plain in ABLATIONS:
            if arm.press == gated and Arm(plain, arm.allocation) in arms:
                yield arm, Arm(plain, arm.allocation)
        if arm.allocation != "uniform" and Arm(arm.press, "uniform") in arms:
            yield arm, Arm(arm.press, "uniform")


def pruning_table(verdict: Verdict) -> Table:
    """Loss over the unpruned model's, a row for each arm and use, a column for each budget."""
    cells: dict[tuple[str, str], dict[str, Any]] = {}
    for row in figure_rows(verdict):
        if row["metric"] == LOSS:
            key = (row["use"], row["label"])
            cells.setdefault(key, {"press": row["label"], "use": row["use"]})[f"{row['budget']:g}"] = row["mean"]
    columns = [Column("press", "press"), Column("use", "use")]
    columns += [Column(f"{budget:g}", f"at {budget:.0%}", "+.4f", "nats") for budget in verdict.trial.budgets]
    caption = f"Loss over the unpruned model's ({fmean(verdict.losses):.4f} nats a token)."
    return Table(columns, list(cells.values()), caption)


def pruning_page(verdict: Verdict, command: str) -> Page:
    """The page; ``command`` is what redoes it."""
    rows = figure_rows(verdict)
    sections = [Section("Loss", "", [pruning_table(verdict)])]
    sections += [Section(use.capitalize(), text, _figures(verdict, rows, use)) for use, text in USES.items()]
    sections.append(Section("Mini tasks", ANSWERS_TEXT, _answer_figures(verdict, rows)))
    ablations = ablation_rows(verdict)
    if ablations:
        columns = [
            Column("pair", "difference"), Column("use", "use"), Column("budget", "budget", ".0%"),
            Column("mean", "loss difference", "+.4f", "nats"), Column("interval", "95 % interval", "+.4f"),
        ]  # fmt: skip
        text = "Each gated way minus the same way without gates on the same samples; below zero the gate helps."
        sections.append(Section("What the gate adds", text, [Table(columns, ablations)]))
    sections.append(Section("Every figure", INTERVALS_TEXT, [_figure_table(rows)]))
    return Page(
        title=f"Pruning the key/value cache of {verdict.name}",
        lead=_lead(verdict, rows),
        command=command,
        sections=[section for section in sections if section.content],
        environment={key: str(value) for key, value in verdict.context.items()},
    )


def _figure_table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = [
        Column("label", "press"), Column("use", "use"), Column("budget", "budget", ".0%"), Column("keys", "keys", "d"),
        Column("title", "figure"), Column("mean", "mean", ".4f"), Column("interval", "95 % interval", ".4f"),
    ]  # fmt: skip
    titles = {**METRICS, FOUND: "references found, %"}
    return Table(columns, [row | {"title": titles[row["metric"]]} for row in rows])


def _lead(verdict: Verdict, rows: Sequence[dict[str, Any]]) -> str:
    trial, least = verdict.trial, min(verdict.trial.budgets)
    sentences = [
        f"{len(verdict.losses)} samples, a context of {trial.context} tokens and {trial.continuation} to go on; "
        f"unpruned the model loses {fmean(verdict.losses):.4f} nats a token."
    ]
    for use in USES:
        found = [row for row in rows if (row["use"], row["metric"], row["budget"]) == (use, LOSS, least)]
        if found:
            best = min(found, key=lambda row: row["mean"])
            sentences.append(
                f"At {least:.0%} of the keys {best['label']} costs least in {use}: {best['mean']:+.4f} nats "
                f"({best['low']:+.4f} to {best['high']:+.4f}); the others' intervals say whether that means anything."
            )
    return " ".join(sentences)


def _figures(verdict: Verdict, rows: Sequence[dict[str, Any]], use: str) -> list[Figure]:
    figures = []
    for metric, title in METRICS.items():
        drawn = [row for row in rows if (row["use"], row["metric"]) == (use, metric)]
        if not drawn:
            continue
        chart = line_chart(
            drawn,
            Column("budget", "keys kept", ".0%"),
            Column("mean", title, ".4f", "nats"),
            Column("label", "press", names=[arm.label for arm in verdict.trial.arms]),
            f"{title[0].upper()}{title[1:]}, {use}",
            log_x=len(verdict.trial.budgets) > 1,
            reference=Reference("unpruned", 0.0),
        )
        figures.append(Figure(chart, USES[use], DEFINITION, _context_line(verdict)))
    return figures


def _answer_figures(verdict: Verdict, rows: Sequence[dict[str, Any]]) -> list[Figure]:
    drawn = [row for row in rows if (row["use"], row["metric"]) == (ANSWERS, FOUND)]
    if not drawn:
        return []
    chart = line_chart(
        drawn,
        Column("budget", "keys kept", ".0%"),
        Column("mean", "references found", ".1f", "%"),
        Column("label", "press", names=[arm.label for arm in verdict.trial.arms]),
        "References found in the mini tasks",
        log_x=len(verdict.trial.budgets) > 1,
        reference=Reference("unpruned", fmean(verdict.found)),
    )
    caption = f"{len(verdict.found)} samples of {verdict.trial.ruler_length} tokens, all tasks together."
    return [Figure(chart, caption, DEFINITION, _context_line(verdict))]


def _context_line(verdict: Verdict) -> str:
    context = verdict.context
    return f"{verdict.name}; text {context['text']}; {len(verdict.losses)} samples; BOS {context['bos']}"


def write_pruning(folder: Path, verdict: Verdict, command: str) -> Path:
    """Write the page, ``pruning.json``, ``pruning.csv``, ``samples.csv`` and ``figures/``; returns the page's path.

    The folder appears whole or not at all, in place of an earlier one.
    """
    rows = figure_rows(verdict)
    samples = [
        {"model": verdict.name, **score.arm._asdict(), **{key: getattr(score, key) for key in SAMPLE_COLUMNS[3:]}}
        for score in verdict.scores
    ]
    whole = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "model": verdict.name,
        "context": verdict.context,
        "unpruned_losses": verdict.losses,
        "unpruned_found": verdict.found,
        "figures": [{column: row[column] for column in COLUMNS} for row in rows],
        "gates_add": [
            {key: value for key, value in row.items() if key != "interval"} for row in ablation_rows(verdict)
        ],
    }
    texts = (
        json.dumps(whole, indent=1, allow_nan=False) + "\n",
        to_csv(COLUMNS, rows),
        to_csv(SAMPLE_COLUMNS, samples),
    )
    return write_report(folder, pruning_page(verdict, command), dict(zip(FILES, texts, strict=True)))

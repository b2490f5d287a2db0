"""The results of ``benchmarks/pruning.py`` as tables and one page of charts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from gatelab.longcontext.kv_pruning.report import USES
from gatelab.longcontext.kv_pruning.trial import ANSWERS
from gatelab.report.charts import Reference, line_chart
from gatelab.report.page import Figure, Page, Section
from gatelab.report.tables import Column, Table

Row = dict[str, Any]
EXPLORATORY = "Means over seeds with 95 % t intervals of the seeds; exploratory, so none is a verdict."
METRICS = {"loss_difference": "loss over the unpruned model's", "kl": "KL from the unpruned model"}


def table_of(summary: Sequence[Row], arm: str, use: str) -> Table:
    """Loss over the unpruned model's of one arm, a row for each press, a column for each budget."""
    rows = [row for row in summary if (row["arm"], row["use"], row["metric"]) == (arm, use, "loss_difference")]
    cells = [({"press": row["press"]}, row) for row in rows]
    return by_budget(cells, "+.3f", f"{arm}, {use}: loss over the unpruned model's, nats a token.")


def differences_table(summary: Sequence[Row], key: str, caption: str) -> Table:
    """Paired differences in loss, a row for each arm, use and press."""
    rows = [row for row in summary if row["metric"] == "loss_difference" and key in row]
    cells = [
        (
            {"arm": row["arm"], "use": row["use"], "difference": f"{row['press']} - {row[key]['press']}"},
            row[key] | {"budget": row["budget"]},
        )
        for row in rows
    ]
    return by_budget(cells, "+.3f", caption)


def answers_table(summary: Sequence[Row], task: str) -> Table:
    """References found in one mini task, in percent."""
    cells = [({"arm": row["arm"], "press": row["press"]}, row) for row in summary if row["metric"] == task]
    return by_budget(cells, ".0f", f"{task} (not RULER): references found, percent; none: nothing is cut.")


def by_budget(cells: Sequence[tuple[Row, Row]], spec: str, caption: str) -> Table:
    """A row for each set of names, a column for each budget; ``cells`` are the names with the figures of one budget."""
    budgets = sorted({found["budget"] for _, found in cells}, reverse=True)
    rows: dict[tuple[Any, ...], Row] = {}
    for names, found in cells:
        rows.setdefault(tuple(names.values()), dict(names))[f"{found['budget']:g}"] = with_interval(found, spec)
    columns = [Column(name, name) for name in (cells[0][0] if cells else ())]
    columns += [Column(f"{one:g}", f"at {one:.0%}", align="right") for one in budgets]
    return Table(columns, list(rows.values()), caption)


def with_interval(found: Row, spec: str) -> str:
    """A mean, with its interval where there is one."""
    return f"{found['mean']:{spec}}" + (f" [{found['low']:{spec}}, {found['high']:{spec}}]" if "low" in found else "")


def pruning_page(summary: Sequence[Row], settings: Row) -> Page:
    """The report, every figure from ``summary.json``."""
    arms = list(dict.fromkeys(row["arm"] for row in summary))
    tasks = list(dict.fromkeys(row["metric"] for row in summary if row["use"] == ANSWERS))
    seeds = max(row["seeds"] for row in summary)
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    lead = (
        f"Decoders of the long-context study, {seeds} seeds an arm: a context of {settings['context']} tokens is cut "
        f"to a share of its keys, and {settings['continuation']} further ones are judged by it, {settings['samples']} "
        "held-out texts a decoder. Do gates say which keys can go? Figures: summary.json, samples.csv."
    )
    return Page(
        title="Pruning the cache by gates",
        lead=lead,
        command=shlex.join(["python", "benchmarks/pruning.py", *words]),
        sections=[
            Section(
                "What gates add",
                EXPLORATORY,
                [
                    differences_table(
                        summary,
                        "less_same_without_gates",
                        "Loss of each way that reads gates less the same without; below 0 the gates help.",
                    )
                ],
            ),
            *(Section(use.capitalize(), text, _of_use(summary, arms, use)) for use, text in USES.items()),
            Section(
                "Mini tasks",
                "The prompt but for its last token is read before the cut; what is asked for comes after it.",
                [answers_table(summary, task) for task in tasks],
            ),
            Section(
                "Against chance",
                "",
                [differences_table(summary, "less_random", "Loss of each press less that of `random`.")],
            ),
        ],
    )


def _of_use(summary: Sequence[Row], arms: Sequence[str], use: str) -> list[Table | Figure]:
    found: list[Table | Figure] = []
    for arm in arms:
        found.append(table_of(summary, arm, use))
        for metric, title in METRICS.items():
            drawn = [row for row in summary if (row["arm"], row["use"], row["metric"]) == (arm, use, metric)]
            chart = line_chart(
                drawn,
                Column("budget", "keys kept", ".0%"),
                Column("mean", title, ".4f", "nats"),
                Column("press", "press", names=list(dict.fromkeys(row["press"] for row in drawn))),
                f"{arm}: {title}, {use}",
                log_x=True,
                reference=Reference("unpruned", 0.0),
            )
            found.append(Figure(chart, USES[use], "Mean over the continuation's predictions, samples and seeds.", arm))
    return found

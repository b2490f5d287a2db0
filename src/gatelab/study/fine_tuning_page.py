"""The report on a model that was fine-tuned on chats: what it learned, and what became of sinks, gates and maxima."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gatelab.report.charts import Reference, line_chart
from gatelab.report.page import Figure, Page, Section
from gatelab.report.tables import Column, Table, transposed
from gatelab.study.fine_tuning import FineTuned

BEFORE, AFTER = STATES = ("before", "fine-tuned")
_STATE = Column("state", "model", names=STATES)
_LAYER = Column("layer", "layer", "d")


def fine_tuning_table(tuned: FineTuned) -> Table:
    """The model before and after, on the same held-out chats."""
    columns = [
        _STATE,
        Column("loss", "loss of an answer's token", ".4f"),
        Column("perplexity", "perplexity of answers", ".3f"),
        Column("worst", "first-token attention, worst layer", ".4f"),
        Column("first_token", "first-token attention, mean", ".4f"),
        Column("largest", "largest |h|", ".1f"),
        Column("gate", "mean gate score", ".4f"),
    ]
    rows = [
        {
            "state": state,
            "loss": figures["loss"],
            "perplexity": figures["perplexity"],
            "worst": summary["first_token_attention_worst_layer"],
            "first_token": summary["first_token_attention"],
            "largest": summary["largest_activation"],
            "gate": summary["gate_mean"],
        }
        for state, (figures, summary) in _states(tuned).items()
    ]
    floor = tuned.before["measurement"]["summary"]["first_token_attention_floor"]
    tokens = _states(tuned)[AFTER][0]["tokens"]
    caption = f"{tokens:,} answer tokens. Uniform attention gives a first-token attention of {floor:.4f}. One seed."
    return transposed(Table(columns, rows, caption), "held-out chats")


def fine_tuning_page(tuned: FineTuned, command: str) -> Page:
    """The whole report; every figure comes from the files that :func:`fine_tune` wrote."""
    return Page(
        title=f"{tuned.name}, fine-tuned on {tuned.chats.label}",
        lead=_lead(tuned),
        command=command,
        sections=[
            Section("Before and after", _conditions(tuned), [fine_tuning_table(tuned), _curve(tuned)]),
            Section("Sinks, gates and hidden maxima", "", _by_layer(tuned)),
        ],
        environment=tuned.after.environment,
        notes=tuned.after.attributions,
    )


def _states(tuned: FineTuned) -> dict[str, tuple[dict[str, Any], Mapping[str, Any]]]:
    """Held-out figures and measured summary of each model."""
    label = tuned.chats.label
    return {
        BEFORE: (tuned.before["heldout"][label], tuned.before["measurement"]["summary"]),
        AFTER: (tuned.after.result["heldout"][label], tuned.after.measurement["summary"]),
    }


def _lead(tuned: FineTuned) -> str:
    (before, sinks_before), (after, sinks_after) = _states(tuned).values()
    worst = "first_token_attention_worst_layer"
    return (
        f"Loss of an answer's token on held-out chats: {before['loss']:.4f} before, {after['loss']:.4f} after. "
        f"First-token attention in the worst layer: {sinks_before[worst]:.4f} before, {sinks_after[worst]:.4f} after; "
        f"largest hidden value: {sinks_before['largest_activation']:.1f} before, "
        f"{sinks_after['largest_activation']:.1f} after. One seed: these are figures of two models, not of a method."
    )


def _conditions(tuned: FineTuned) -> str:
    return (
        f"Trained on {tuned.after.result['tokens']:,} tokens of packed windows, padding included. The loss counts the "
        "tokens of answers and those that end them, no others; chats in one window do not see each other, so the first "
        "token of each query is the BOS of its own chat."
    )


def _curve(tuned: FineTuned) -> Figure:
    rows = [
        {"state": AFTER, "step": row["step"], "loss": row["loss"]}
        for row in tuned.after.metrics
        if row["kind"] == "evaluation"
    ]
    loss = Column("loss", "cross-entropy", ".4f", "nats per answer token")
    chart = line_chart(rows, Column("step", "training step", ",d"), loss, _STATE, "Held-out loss on the way")
    return Figure(chart, "Scored on the first windows of the held-out chats only; the table above has all of them.")


def _by_layer(tuned: FineTuned) -> list[Figure]:
    measured = {BEFORE: tuned.before["measurement"], AFTER: tuned.after.measurement}
    rows = [
        {
            "state": state,
            "layer": layer["layer"],
            "share": sum(layer["first_token"]) / len(layer["first_token"]),
            "largest": layer["hidden"]["value"],
            **{f"gate_{position}": gate["mean"] for position, gate in layer["gates"].items()},
        }
        for state, measurement in measured.items()
        for layer in measurement["layers"]
    ]
    context, positions = measured[BEFORE]["context"], [layer["gates"] for layer in measured[BEFORE]["layers"]]
    where = f"On {context['num_sequences']} held-out windows of T = {context['tokens_per_sequence']} tokens."

    def figure(column: Column, title: str, definition: str, reference: Reference | None = None) -> Figure:
        held = [row for row in rows if column.key in row]
        chart = line_chart(held, _LAYER, column, _STATE, title, reference=reference)
        return Figure(chart, "Before and after.", definition, where)

    return [
        figure(
            Column("share", "attention to the first token", ".3f"),
            "First-token attention by layer",
            "Mean over queries, then heads, of the attention probability on the first token of the query's chat.",
            Reference("uniform attention", tuned.before["measurement"]["floor"]),
        ),
        figure(
            Column("largest", "largest |h|", ".1f"),
            "Hidden maxima by layer",
            "The largest absolute value behind each layer, over all tokens and channels.",
        ),
        *(
            figure(
                Column(f"gate_{position}", "mean score", ".4f"),
                f"Gate scores by layer: {position}",
                "Mean over tokens, heads and, for elementwise gates, channels.",
            )
            for position in dict.fromkeys(position for gates in positions for position in gates)
        ),
    ]

"""The report on a gate added to a trained decoder: what moved, and whether it mattered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gatelab.report.charts import Reference, line_chart
from gatelab.report.page import Figure, Page, Section
from gatelab.report.tables import Column, Table, transposed
from gatelab.study.gate_adding import AddedGate
from gatelab.study.gate_movement import MOVED_BY, mean_score_change
from gatelab.study.runner import ArmRun
from gatelab.study.statistics import TextDifference, compare_on_documents

BEFORE, WITHOUT, WITH = STATES = ("before", "trained on without", "trained on with the gate")
_STATE = Column("state", "model", names=STATES)
_LAYER = Column("layer", "layer", "d")


def added_gate_table(added: AddedGate) -> Table:
    """The model before, trained on without the gate, and trained on with it, on the same held-out text."""
    columns = [
        _STATE,
        Column("parameters", "parameters", ",d"),
        *(Column(f"perplexity_{name}", f"perplexity, {name}", ".3f") for name in added.before["heldout"]),
        Column("worst", "first-token attention, worst layer", ".4f"),
        Column("first_token", "first-token attention, mean", ".4f"),
        Column("largest", "largest |h|", ".1f"),
        Column("gate", "mean gate score", ".4f"),
    ]
    rows = []
    for state, (heldout, summary, parameters) in _states(added).items():
        perplexities = {f"perplexity_{name}": figures["perplexity"] for name, figures in heldout.items()}
        rows.append(
            {
                "state": state,
                "parameters": parameters,
                **perplexities,
                "worst": summary["first_token_attention_worst_layer"],
                "first_token": summary["first_token_attention"],
                "largest": summary["largest_activation"],
                "gate": summary["gate_mean"],
            }
        )
    floor = added.before["measurement"]["summary"]["first_token_attention_floor"]
    caption = f"Uniform attention gives a first-token attention of {floor:.4f}. One seed."
    return transposed(Table(columns, rows, caption), "held-out text")


def added_gate_page(added: AddedGate, command: str) -> Page:
    """The whole report; every figure comes from the files that :func:`add_and_train` wrote."""
    return Page(
        title=f"{added.gate}, added to a trained model",
        lead=_lead(added),
        command=command,
        sections=[
            Section("Before and after", _control_text(added), [added_gate_table(added), _heldout_curves(added)]),
            _start(added),
            _movement(added),
            _sinks(added),
        ],
        environment=added.gated.environment,
        notes=added.gated.attributions,
    )


def text_difference(added: AddedGate) -> TextDifference | None:
    """Training on with the gate against without, on the first domain; ``None`` where the text has no documents."""
    if not added.without.documents:
        return None
    domain = next(iter(added.without.documents))
    return compare_on_documents(added.gated.documents[domain], added.without.documents[domain])


def _states(added: AddedGate) -> dict[str, tuple[dict[str, Any], Mapping[str, Any], int]]:
    """Held-out figures, measured summary and parameters of each model."""
    without = added.without.result["parameters"]
    return {
        BEFORE: (added.before["heldout"], added.before["measurement"]["summary"], without),
        WITHOUT: (added.without.result["heldout"], added.without.measurement["summary"], without),
        WITH: (added.gated.result["heldout"], added.gated.measurement["summary"], added.gated.result["parameters"]),
    }


def _lead(added: AddedGate) -> str:
    states = _states(added)
    perplexities = [next(iter(heldout.values()))["perplexity"] for heldout, _, _ in states.values()]
    sinks = [summary["first_token_attention_worst_layer"] for _, summary, _ in states.values()]
    difference = text_difference(added)
    interval = ""
    if difference is not None:
        relative = difference.relative_perplexity
        interval = f" With against without: {relative.value:+.2%} (95 %, text only: {relative.low:+.2%} to "
        interval += f"{relative.high:+.2%})."
    moved = mean_score_change(added.movement)
    return (
        f"Held-out perplexity: {perplexities[0]:.3f} before, {perplexities[1]:.3f} trained on without the gate, "
        f"{perplexities[2]:.3f} with it.{interval} Gate scores moved by {moved:.2g} on average. First-token attention "
        f"in the worst layer: {sinks[0]:.4f} before, {sinks[1]:.4f} without, {sinks[2]:.4f} with.\n\n"
        "The authors of the paper report that a gate added after training brings no gain. One seed: the interval is of "
        "the held-out text alone, and a difference within it says nothing either way."
    )


def _control_text(added: AddedGate) -> str:
    tokens = added.gated.result["tokens"]
    return (
        f"Both arms start from equal weights and read the same {tokens:,} tokens in the same order, at the same "
        "learning rate; so what training on alone changes is the column in the middle. The arm with the gate has more "
        "parameters, and a learning rate of its own for them; a model that was not trained to the end gains by both."
    )


def _heldout_curves(added: AddedGate) -> Figure:
    rows = [
        {"state": state, "step": row["step"], "loss": row["loss"]}
        for state, run in _arms(added)
        for row in run.metrics
        if row["kind"] == "evaluation" and row["domain"] == next(iter(added.before["heldout"]))
    ]
    loss = Column("loss", "cross-entropy", ".4f", "nats per token")
    chart = line_chart(rows, Column("step", "training step", ",d"), loss, _STATE, "Held-out loss on the way")
    return Figure(chart, "Scored on the first windows of the held-out text only; the table above has all of it.")


def _arms(added: AddedGate) -> list[tuple[str, ArmRun]]:
    return [(WITHOUT, added.without), (WITH, added.gated)]


def _start(added: AddedGate) -> Section:
    columns = [
        Column("position", "position"),
        Column("activation", "activation"),
        Column("score", "score at the start", ".6g"),
        Column("score_error", "its error", ".2g"),
        Column("logit_error", "error of the logits", ".2g"),
    ]
    rows = [{**one, **{axis: one["gate"][axis] for axis in ("position", "activation")}} for one in added.starts]
    text = (
        "A gate is added with zero weights, so that every score is the same and the model computes what it did. The "
        "error of the logits is the largest difference on random tokens, as a share of the largest logit, with the "
        "weights and in the precision that the model was opened in; 0 says bit-equal."
    )
    return Section("The start", text, [Table(columns, rows)])


def _movement(added: AddedGate) -> Section:
    columns = [
        _LAYER,
        Column("position", "position"),
        Column("score_before", "mean score before", ".5f"),
        Column("score_after", "after", ".5f"),
        Column("mean_change", "mean |change|", ".2g"),
        Column("share_moved", f"moved by over {MOVED_BY:g}", ".1%"),
        Column("norm_before", "norm of weights before", ".3g"),
        Column("norm_after", "after", ".3g"),
        Column("norm_of_change", "norm of change", ".3g"),
        Column("norm_of_query", "norm of query weights", ".3g"),
    ]
    rows = [one._asdict() for one in added.movement]
    position = Column("position", "position", names=list(dict.fromkeys(one.position for one in added.movement)))
    change = Column("mean_change", "mean |change| of scores", ".2g")
    definition = (
        "Mean of |score after - score before| over all tokens, heads and, for elementwise gates, channels of the same "
        "held-out windows. Norms are Frobenius norms over the gate's weights in that layer, without biases."
    )
    chart = line_chart(rows, _LAYER, change, position, "How far scores moved")
    figure = Figure(chart, "One point for each layer.", definition, _measured(added))
    return Section("How far the gates moved", "", [figure, Table(columns, rows)])


def _sinks(added: AddedGate) -> Section:
    measured = {
        BEFORE: added.before["measurement"],
        WITHOUT: added.without.measurement,
        WITH: added.gated.measurement,
    }
    rows = [
        {"state": state, "layer": layer["layer"], "share": sum(layer["first_token"]) / len(layer["first_token"])}
        for state, measurement in measured.items()
        for layer in measurement["layers"]
    ]
    floor = Reference("uniform attention", added.before["measurement"]["floor"])
    share = Column("share", "attention to the first token", ".3f")
    chart = line_chart(rows, _LAYER, share, _STATE, "First-token attention by layer", reference=floor)
    definition = "Mean over queries, then heads, of the attention probability on token 0."
    return Section("The sink", "", [Figure(chart, "Before and after training on.", definition, _measured(added))])


def _measured(added: AddedGate) -> str:
    context = added.before["measurement"]["context"]
    return f"On {context['num_sequences']} held-out windows of T = {context['tokens_per_sequence']} tokens."

"""The report on quantised models: a page, and the numbers behind it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gatelab.evaluate.intervals import Interval
from gatelab.evaluate.quantisation.schemes import find_scheme
from gatelab.evaluate.quantisation.trial import QuantisedModel, SchemeLoss, cost_difference
from gatelab.report.charts import Reference, dot_interval_chart, line_chart
from gatelab.report.folder import to_csv, write_report
from gatelab.report.page import Figure, Page, Section
from gatelab.report.tables import Column, Table

SCHEMA_VERSION = 1
FILES = ("quantisation.json", "quantisation.csv", "texts.csv", "layers.csv")
AS_IT_IS = "as it is"
COLUMNS = ("model", "scheme", "loss", "perplexity", "cost", "low", "high", "clipped", "most_clipped", "texts")
TEXT_COLUMNS = ("model", "scheme", "text", "loss")
LAYER_COLUMNS = ("model", "scheme", "layer", "linear", "metric", "value", "token", "channel")
_METHOD = (
    "Simulated: weights of the linear layers inside the decoder's layers, and what these layers read, are rounded to "
    "the levels that the scheme's integers or float8 values stand for; products and sums are float32. Attention "
    "itself, norms, residual sums, embedding, head, routers, and experts whose weights are one tensor are not rounded. "
    "So this is about accuracy alone: it says nothing of speed or memory, and a kernel that also rounds its sums can "
    "do worse.\n\n"
    "Static ranges are those of the unquantised model on other windows of the same text. Intervals are 95 % t "
    "intervals over texts: of this text, for these weights. They say nothing about other seeds of training."
)
_OUTLIERS = (
    "A range that one large value stretches leaves few levels for all others, so large values and a high kurtosis (3 "
    "for a normal distribution) make a tensor hard to round. Layers that read the same tensor are named together."
)
_OTHER_TOKENS = (
    "The two models read different tokens. Compare each with itself, not nats per token of one with the other's."
)


def scheme_rows(models: Sequence[QuantisedModel]) -> list[dict[str, Any]]:
    """One row for each model and scheme, the model as it is first; costs are nats a token over it."""
    return [_scheme_row(model, loss) for model in models for loss in model.losses]


def layer_rows(models: Sequence[QuantisedModel]) -> list[dict[str, Any]]:
    """Tidy rows by linear layer: sizes of what it reads, and the share that a scheme's static range clips."""
    rows = []
    for model in models:
        for read in model.inputs:
            named = {"model": model.name, "scheme": None, "layer": read.layer, "linear": "+".join(read.readers)}
            largest = read.statistics.largest[0]
            rows.append({**named, "metric": "input_largest", **largest._asdict()})
            for metric in ("kurtosis", "median"):
                value = getattr(read.statistics, metric)
                rows.append({**named, "metric": f"input_{metric}", "value": value, "token": None, "channel": None})
        for loss in model.losses:
            for place, share in loss.clipped.items():
                named = {"model": model.name, "scheme": loss.scheme, "layer": place.layer, "linear": place.name}
                rows.append({**named, "metric": "clipped", "value": share, "token": None, "channel": None})
    return rows


def quantisation_table(models: Sequence[QuantisedModel]) -> Table:
    """Each scheme of each model, for a terminal too."""
    columns = [
        *([Column("model", "model")] if len(models) > 1 else []),
        Column("scheme", "scheme"),
        Column("perplexity", "perplexity", ",.3f"),
        Column("cost", "cost", "+.4f", "nats"),
        Column("interval", "95 %", "+.4f"),
        Column("ratio", "perplexity, times", ",.4g"),
        Column("clipped", "clipped", ".2%"),
    ]
    caption = (
        f"Loss that rounding adds, nats a token, over {len(models[0].plain.nats)} texts that are read before and after."
    )
    return Table(columns, scheme_rows(models), caption)


def finding(model: QuantisedModel) -> str:
    """What the schemes cost a model, in one sentence."""
    costs = [f"{loss.scheme} {_with_interval(model.cost(loss))}" for loss in model.losses[1:]]
    return (
        f"{model.name}: perplexity {model.perplexity(model.plain):,.3f} as it is; rounding adds, in nats a token: "
        f"{'; '.join(costs)}."
    )


def comparisons(models: Sequence[QuantisedModel]) -> list[dict[str, Any]]:
    """What each scheme costs the second model less what it costs the first; empty where that can't be compared."""
    if len(models) < 2:
        return []
    first, second = models
    rows = []
    for loss in first.losses[1:]:
        assert loss.scheme is not None
        interval = cost_difference(second, first, loss.scheme)
        if interval is not None:
            rows.append({"scheme": loss.scheme, **interval._asdict(), "interval": interval.ends})
    return rows


def quantisation_page(models: Sequence[QuantisedModel], command: str) -> Page:
    """The report on one or two models, made from what was measured alone."""
    sections = [Section("What rounding costs", _METHOD, [quantisation_table(models), _cost_figure(models)])]
    if rows := comparisons(models):
        sections.append(Section("Which model is easier to quantise", "", [_comparison_table(models, rows)]))
    sections.append(Section("What linear layers read", _OUTLIERS, list(_input_content(models))))
    sections.append(Section("The schemes", "", [_scheme_table(models[0])]))
    reads_other = len({model.context["tokens_sha256"] for model in models}) > 1
    return Page(
        title=f"Quantisation of {' and '.join(model.name for model in models)}",
        lead="\n\n".join([*map(finding, models), *([_OTHER_TOKENS] if reads_other else [])]),
        command=command,
        sections=sections,
        environment={f"{model.name}, {key}": str(value) for model in models for key, value in model.context.items()},
    )


def write_quantisation(folder: Path, models: Sequence[QuantisedModel], command: str) -> Path:
    """Write ``quantisation.json``, three tables as CSV, ``report.html`` and ``figures/``; returns the page's path.

    The folder appears whole or not at all, in place of an earlier report; ``docs/quantisation.md`` has the schema.
    """
    rows, layers = scheme_rows(models), layer_rows(models)
    texts = [
        {"model": model.name, "scheme": loss.scheme, "text": number, "loss": nats}
        for model in models
        for loss in model.losses
        for number, nats in enumerate(loss.nats)
    ]
    whole = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "models": [{"name": model.name, "context": model.context, "finding": finding(model)} for model in models],
        "schemes": {loss.scheme: _definition(loss) for loss in models[0].losses[1:]},
        "figures": [{column: row[column] for column in COLUMNS} for row in rows],
        "second_less_first": [{**row, "interval": list(row["interval"])} for row in comparisons(models)],
    }
    contents = (
        json.dumps(whole, indent=1, allow_nan=False) + "\n",
        to_csv(COLUMNS, rows),
        to_csv(TEXT_COLUMNS, texts),
        to_csv(LAYER_COLUMNS, layers),
    )
    return write_report(folder, quantisation_page(models, command), dict(zip(FILES, contents, strict=True)))


def _scheme_row(model: QuantisedModel, loss: SchemeLoss) -> dict[str, Any]:
    cost = None if loss.scheme is None else model.cost(loss)
    shares = list(loss.clipped.values())
    return {
        "model": model.name,
        "scheme": loss.scheme or AS_IT_IS,
        "loss": math.fsum(loss.nats) / len(loss.nats),
        "perplexity": model.perplexity(loss),
        "cost": cost and cost.mean,
        "low": cost and cost.low,
        "high": cost and cost.high,
        "interval": cost and cost.ends,
        "ratio": cost and math.exp(min(cost.mean, 700)),
        "clipped": math.fsum(shares) / len(shares) if shares else None,
        "most_clipped": max(shares) if shares else None,
        "texts": len(loss.nats),
    }


def _cost_figure(models: Sequence[QuantisedModel]) -> Figure:
    rows = [
        row | {"name": row["scheme"] if len(models) == 1 else f"{row['scheme']}, {row['model']}"}
        for loss in models[0].losses[1:]
        for row in scheme_rows(models)
        if row["scheme"] == loss.scheme
    ]
    chart = dot_interval_chart(
        rows, Column("name", "scheme"), Column("cost", "added loss", "+.4f", "nats per token"), ("low", "high"),
        "What rounding adds to the loss", reference=Reference("nothing", 0.0),
    )  # fmt: skip
    definition = (
        "Mean over texts of the cross-entropy of the quantised model less that of the same model as it is, with its 95 "
        "% t interval over texts."
    )
    return Figure(chart, "Further right is worse.", definition, _text(models[0]))


def _comparison_table(models: Sequence[QuantisedModel], rows: Sequence[dict[str, Any]]) -> Table:
    columns = [
        Column("scheme", "scheme"), Column("mean", "difference", "+.4f", "nats"), Column("interval", "95 %", "+.4f")
    ]  # fmt: skip
    first, second = (model.name for model in models)
    caption = (
        f"What each scheme adds to the loss of {second} less what it adds to that of {first}, paired by text; below "
        f"zero {second} is easier to quantise. One training of each: another seed may tell otherwise."
    )
    return Table(columns, rows, caption)


def _input_content(models: Sequence[QuantisedModel]) -> Iterator[Figure | Table]:
    layer = Column("layer", "layer", "d")
    for model in models:
        for title, metric, definition in (
            ("Kurtosis", "kurtosis", "Mean over tokens of E[(x - E x)^4] / Var(x)^2 over the channels of an input x."),
            ("Largest value", "value", "The largest |x| over all tokens and channels of the measured texts."),
        ):
            rows = [
                {"layer": read.layer, "linear": _readers(read.readers), metric: getattr(read.statistics, metric)}
                for read in model.inputs
            ]
            heading = f"{title} of what linear layers read, {model.name}"
            is_positive = all(row[metric] > 0 for row in rows)
            value = Column(metric, title.lower(), ",.4g")
            chart = line_chart(rows, layer, value, Column("linear", "read by"), heading, log_y=is_positive)
            yield Figure(chart, f"{title} by decoder layer.", definition, _text(model))
        yield _input_table(model)


def _input_table(model: QuantisedModel) -> Table:
    columns = [
        Column("linear", "read by"), Column("kurtosis", "largest kurtosis", ",.1f"),
        Column("kurtosis_layer", "in layer", "d"), Column("value", "largest value", ",.1f"),
        Column("ratio", "in medians", ",.0f"), Column("value_layer", "in layer", "d"),
        Column("token", "token", "d"), Column("channel", "channel", "d"),
    ]  # fmt: skip
    rows = []
    for readers in dict.fromkeys(read.readers for read in model.inputs):
        reads = [read for read in model.inputs if read.readers == readers]
        sharpest = max(reads, key=lambda read: read.statistics.kurtosis)
        largest = max(reads, key=lambda read: read.statistics.value)
        rows.append({
            "linear": _readers(readers),
            "kurtosis": sharpest.statistics.kurtosis,
            "kurtosis_layer": sharpest.layer,
            **largest.statistics.largest[0]._asdict(),
            "ratio": largest.statistics.ratio,
            "value_layer": largest.layer,
        })  # fmt: skip
    return Table(columns, rows, f"The layers of {model.name} whose inputs stand out most.")


def _scheme_table(model: QuantisedModel) -> Table:
    columns = [Column("scheme", "scheme"), Column("weights", "weights"), Column("activations", "activations"),
               Column("origin", "origin")]  # fmt: skip
    rows = []
    for loss in model.losses[1:]:
        scheme = find_scheme(str(loss.scheme))
        rows.append({
            "scheme": loss.scheme,
            "weights": scheme.weights and scheme.weights.description,
            "activations": scheme.activations and scheme.activations.description,
            "origin": scheme.origin,
        })  # fmt: skip
    return Table(columns, rows)


def _readers(names: Sequence[str]) -> str:
    """The last parts that tell the layers apart: ``q_proj, k_proj``."""
    short = [name.removesuffix(".projection").rpartition(".")[2] for name in names]
    return ", ".join(short)


def _definition(loss: SchemeLoss) -> dict[str, Any]:
    return find_scheme(str(loss.scheme)).to_mapping()


def _with_interval(interval: Interval) -> str:
    return f"{interval.mean:+.4f} ({interval.low:+.4f} to {interval.high:+.4f})"


def _text(model: QuantisedModel) -> str:
    context = model.context
    return (
        f"{context['samples']} x {context['length']:,} tokens of {context['text']}, and "
        f"{context['calibration_samples']} windows to calibrate on; BOS: {context['bos']}."
    )

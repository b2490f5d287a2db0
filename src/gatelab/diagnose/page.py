"""One page for one measured model, or for two side by side on shared scales: rows and contexts in, nothing else.

A figure without rows is left out, and so is a section without figures. Every chart carries its definition and the
context that its numbers depend on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gatelab.diagnose import figures
from gatelab.diagnose.figures import Curve
from gatelab.diagnose.results import NamedResult
from gatelab.diagnose.series import (
    DrawnRow,
    Results,
    context_parts,
    flattened,
    floor_series,
    gate_shares,
    head_grid,
    histogram_bins,
    largest_values,
    layer_series,
    series_name,
    target_shares,
    top_keys,
)
from gatelab.diagnose.verdict import MASSIVE_VALUE, verdict_of
from gatelab.report.charts import Reference, bar_chart, heat_map, histogram, line_chart
from gatelab.report.page import Figure, Page, Section
from gatelab.report.tables import Column, Table, transposed

Content = list[Figure | Table]

_MOST_LISTED = 5
_LEAST_RATIO_OF_LOG = 10
_LAYER, _HEAD, _PANEL = Column("layer", "layer", "d"), Column("head", "head", "d"), Column("panel", "model")


def diagnosis_page(results: Results, command: str) -> Page:
    """The report on one or two models, made from their tidy rows and contexts alone; ``command`` is what redoes it.

    Raises ``ValueError`` for no result, for more than two, and for two of one name.
    """
    names = [result.name for result in results]
    if len(names) not in (1, 2) or len(set(names)) < len(names):
        raise ValueError(f"a page shows one model, or two of different names, not {names}; rename or leave one out")
    sections = [
        Section("Verdict", figures.VERDICT_TEXT, [verdict_table(results), *_left_out(results)]),
        Section("First-token attention", figures.SINK_TEXT, _first_token(results)),
        Section("Where attention goes", figures.TARGET_TEXT, _targets(results)),
        Section("Hidden states", figures.HIDDEN_TEXT, _hidden(results)),
        Section("Gates", figures.GATE_TEXT, _gates(results)),
        Section("Rank", figures.RANK_TEXT, _curves(results, figures.RANK_CURVES)),
        Section("Entropy and distance", figures.SPREAD_TEXT, _curves(results, figures.SPREAD_CURVES)),
        Section("Probes", figures.PROBE_TEXT, _probes(results)),
        Section("Context", figures.CONTEXT_TEXT, [_context_table(results)]),
    ]
    return Page(
        title=f"Diagnosis of {' and '.join(names)}",
        lead="\n\n".join(_lead(result, len(results)) for result in results),
        command=command,
        sections=[section for section in sections if section.content],
    )


def verdict_table(results: Results) -> Table:
    """The short table, for a terminal too: a column for each model, each figure beside its floor."""
    columns = [
        Column("model", "model"),
        Column("sink", "attention sink"),
        Column("heads", "heads above 0.3", ".1%"),
        Column("mean", "first-token attention", ".4f"),
        Column("floor", "uniform floor", ".4f"),
        Column("worst", "in its worst layer"),
        Column("massive", "massive activations"),
        Column("largest", "largest |h|", ",.1f"),
        Column("maxima", "mean of layers' largest", ",.1f"),
        Column("gate", "mean gate"),
        Column("shut", "gates shut"),
    ]
    caption = "Means over heads, then layers. First-token attention means something only beside its floor."
    rows = [_verdict_row(result) for result in results]
    shown = [columns[0], *(column for column in columns[1:] if any(column.key in row for row in rows))]
    return transposed(Table(shown, rows, caption), "figure")


def _verdict_row(result: NamedResult) -> dict[str, Any]:
    sink, massive, gates = verdict_of(result)
    row: dict[str, Any] = {"model": result.name}
    if sink:
        row |= {"sink": sink.answer, "heads": sink.share_of_heads, "mean": sink.mean, "floor": sink.floor}
        row["worst"] = f"{sink.worst_layer_mean:.4f} in layer {sink.worst_layer}"
    if massive:
        count = f"in {len(massive.layers)} of {massive.num_layers} layers"
        row |= {"massive": count if massive.layers else "no"}
        row |= {"largest": massive.largest, "maxima": massive.mean_of_maxima}
    if gates:
        row["gate"] = ", ".join(f"{gate.mean:.3f}" for gate in gates)
        row["shut"] = ", ".join("–" if gate.shut is None else f"{gate.shut:,} of {gate.num_gates:,}" for gate in gates)
    return row


def _lead(result: NamedResult, num_models: int) -> str:
    sentences = verdict_of(result).sentences()
    return " ".join([f"{result.name}.", *sentences] if num_models > 1 else sentences)


def _left_out(results: Results) -> list[Table]:
    """The layers without softmax attention, by name."""
    rows = [
        {"model": result.name, "layer": str(layer), "reason": str(reason)}
        for result in results
        for layer, reason in dict(result.context.get("skipped_layers") or {}).items()
    ]
    columns = [Column("model", "model"), Column("layer", "layer", align="right"), Column("reason", "left out because")]
    return [Table(columns, rows, "Layers that no figure of attention counts.")] if rows else []


def _first_token(results: Results) -> Content:
    metric, heading = "first_token_attention", "attention to the first token"
    caption = "All panels are on one scale. Heads at or under the floor look alike."
    heads = _heads(results, metric, Column("value", heading, ".4f"), "Every head", caption, figures.FIRST_TOKEN)
    ranges = {int(one.removeprefix("from_")) for result in results for one in result.query_ranges(metric)}
    curves = [Curve("By layer", heading, ".4f", {"": metric}, figures.BAND, figures.FIRST_TOKEN)]
    if ranges:
        title, caption = f"By layer, queries from {max(ranges)} on", figures.LATER_QUERIES
        later = f"from_{max(ranges)}"
        curves.append(Curve(title, heading, ".4f", {"": metric}, caption, figures.FIRST_TOKEN, query_range=later))
    return [*heads, *_curves(results, curves)]


def _targets(results: Results) -> Content:
    rows = target_shares(results, _target_metrics(results))
    content: Content = []
    if {row["target"] for row in rows} - {"first token"}:
        target, share = Column("target", "keys"), Column("share", "share of attention", ".4f")
        chart = bar_chart(rows, target, share, "By kind of key", series=_series(results, rows))
        caption = "The kinds overlap: the first token is one of the first few."
        definition = "Attention summed over the named keys; mean over samples and queries, then heads, then layers."
        content.append(Figure(chart, caption, definition, _context_line(results)))
    return [*content, *_top_keys(results), *_curves(results, figures.TARGET_CURVES)]


def _target_metrics(results: Results) -> dict[str, str]:
    """What a bar is called, and its metric: the first token, the first k, the first real key, delimiters, sinks."""
    targets = {"first token": "first_token_attention"}
    for metric in dict.fromkeys(metric for result in results for metric in result.metrics):
        count = metric.removeprefix("first_").removesuffix("_attention")
        if count.isdigit():
            targets[f"first {count} tokens"] = metric
    targets["first real key"] = "first_real_key_attention"
    for token in _arguments(results, "delimiter_attention"):
        targets[f"delimiter {json.dumps(token, ensure_ascii=False)}"] = f"delimiter_attention[{token}]"
    return targets | {"learned sink": "learned_sink_attention"}


def _top_keys(results: Results) -> list[Table]:
    rows = [{"model": one.name, **key._asdict()} for one in results for key in top_keys(one, _MOST_LISTED)]
    columns = [
        *([Column("model", "model")] if len(results) > 1 else []),
        Column("position", "key position", ",d"),
        Column("num_heads", "heads", ",d"),
        Column("share_of_heads", "of all heads", ".1%"),
        Column("attention", "their attention to it", ".4f"),
    ]
    caption = f"The key position with most attention in each head: the {_MOST_LISTED} commonest."
    return [Table(columns, rows, caption)] if rows else []


def _hidden(results: Results) -> Content:
    metrics = {"largest": "largest_activation"}
    if len(results) == 1:
        metrics |= {"second": "second_activation", "third": "third_activation"}
    metrics["median"] = "median_activation"
    caption = "A massive activation stands orders of magnitude above the median of its layer."
    title = "Largest and median hidden values"
    curve = Curve(title, "|h|", ",.3g", metrics, caption, figures.HIDDEN_VALUE, log=True)
    rows = [{"model": one.name, **row} for one in results for row in largest_values(one, _MOST_LISTED)]
    columns = [
        *([Column("model", "model")] if len(results) > 1 else []),
        _LAYER,
        Column("largest", "largest |h|", ",.1f"),
        Column("token", "token", ",d"),
        Column("channel", "channel", "d"),
        Column("second", "second", ",.1f"),
        Column("third", "third", ",.1f"),
        Column("median", "median", ",.3g"),
        Column("ratio", "largest / median", ",.0f"),
    ]
    caption = f"The {_MOST_LISTED} layers with the largest hidden values, and where these are."
    tables = [Table(columns, rows, caption)] if rows else []
    return [*_curves(results, [curve]), *tables, *_curves(results, figures.HIDDEN_CURVES)]


def _gates(results: Results) -> Content:
    content: Content = []
    for position in _arguments(results, "gate_mean"):
        metric, heading = f"gate_mean[{position}]", "mean gate score"
        curve = Curve(f"Gates at {position}, by layer", heading, ".3f", {"": metric}, figures.BAND, figures.GATE_SCORE)
        title, caption = f"Gates at {position}, every head", "At 1 a head's output passes, at 0 it is shut."
        content += _curves(results, [curve])
        content += _heads(results, metric, Column("value", heading, ".3f"), title, caption, figures.GATE_SCORE)
        content += _histogram(results, position)
    return [_gate_table(results), *content, *_curves(results, figures.GATE_CURVES)] if content else []


def _gate_table(results: Results) -> Table:
    columns = [
        Column("gate", "gates"),
        Column("mean", "mean score", ".3f"),
        Column("gate_below_0.01", "scores below 0.01", ".1%"),
        Column("gate_below_0.1", "scores below 0.1", ".1%"),
        Column("gate_above_0.9", "scores above 0.9", ".1%"),
        Column("gate_binary_entropy", "entropy of a score", ".3f", "nats"),
        Column("first_token", "mean, first token as query", ".3f"),
        Column("rest", "mean, other queries", ".3f"),
        Column("gate_sink_correlation", "correlation with first-token attention", "+.2f"),
        Column("gate_attention_entropy_correlation", "correlation with attention entropy", "+.2f"),
        Column("num_gates", "gates", ",d"),
        Column("shut", "shut", ",d"),
        Column("sparse", "sparse", ",d"),
    ]
    rows = [
        gate._asdict() | gate_shares(result, gate.position) | {"gate": series_name(results, result, gate.position)}
        for result in results
        for gate in verdict_of(result).gates
    ]
    return transposed(Table(columns, rows, figures.GATE_FLAGS), "gates")


def _probes(results: Results) -> Content:
    """Perplexity with clamped gates, and the error of a narrow dtype."""
    context, content = _context_line(results), []
    arms = [
        {"arm": arm.replace("_", " "), "series": result.name, "perplexity": result.whole(f"clamped_perplexity[{arm}]")}
        for arm in _arguments(results, "clamped_perplexity")
        for result in results
    ]
    if arms:
        arm, perplexity = Column("arm", "gates"), Column("perplexity", "perplexity", ".2f")
        chart = bar_chart(arms, arm, perplexity, "Perplexity with clamped gates", series=_series(results, arms))
        content.append(Figure(chart, figures.CLAMP_CAPTION, figures.CLAMP_DEFINITION, context))
    for dtypes in _arguments(results, "logits_error"):
        content += _curves(results, figures.precision_curves(dtypes))
        rows = [
            {"model": result.name, **{key: result.whole(f"{key}_error[{dtypes}]") for key in ("logits", "gradient")}}
            for result in results
        ]
        columns = [Column("model", "model"), Column("logits", "logits", ".2e"), Column("gradient", "gradients", ".2e")]
        content.append(Table(columns, rows, f"Relative errors of the whole model, {dtypes.replace('_', ' ')}."))
    return content


def _curves(results: Results, curves: Sequence[Curve]) -> list[Figure]:
    """The charts that have something to show."""
    return [figure for curve in curves for figure in _curve(results, curve)]


def _curve(results: Results, curve: Curve) -> list[Figure]:
    rows = layer_series(results, curve.metrics, curve.query_range)
    if not any(row["value"] for row in rows):
        return []
    values = [row["value"] for row in rows]
    log = curve.log and min(values) > 0 and max(values) > _LEAST_RATIO_OF_LOG * min(values)
    reference, single = None, len(curve.metrics) == 1
    banded = single and any(row["low"] < row["high"] for row in rows)
    if single:
        floor = floor_series(results, next(iter(curve.metrics.values())), curve.query_range)
        rows += floor if isinstance(floor, list) else []
        reference = Reference("uniform attention", floor) if isinstance(floor, float) else None
    if "largest_activation" in curve.metrics.values() and max(values) > MASSIVE_VALUE:
        reference = Reference("massive above", MASSIVE_VALUE)
    chart = line_chart(
        rows,
        _LAYER,
        Column("value", curve.heading, curve.format),
        _series(results, rows),
        curve.title,
        log_y=log,
        band=("low", "high") if banded else None,
        reference=reference,
    )
    return [Figure(chart, curve.caption, curve.definition, _context_line(results))]


def _heads(results: Results, metric: str, value: Column, title: str, caption: str, definition: str) -> list[Figure]:
    """A map of layers and heads for each model, all on one scale that starts at the smallest floor."""
    rows = head_grid(results, metric)
    if not rows:
        return []
    floors = [row["floor"] for result in results for row in result.select(metric) if row["floor"] is not None]
    floor = Reference("uniform attention", min(floors)) if floors else None
    panel = _PANEL if len(results) > 1 else None
    chart = heat_map(rows, _HEAD, _LAYER, value, title, panel=panel, floor=floor)
    return [Figure(chart, caption, definition, _context_line(results))]


def _series(results: Results, rows: Sequence[DrawnRow]) -> Column:
    """The column that names a chart's series; a model keeps its colour where the other one is missing."""
    names, models = [row["series"] for row in rows], [result.name for result in results]
    return Column(
        "series", "series", names=list(dict.fromkeys([*models, *names] if set(models) & set(names) else names))
    )


def _arguments(results: Results, metric: str) -> list[str]:
    """The gate positions or delimiter tokens that any of the models was measured at."""
    return list(dict.fromkeys(argument for result in results for argument in result.arguments(metric)))


def _histogram(results: Results, position: str) -> list[Figure]:
    """Shares of the scores in equal bins of [0, 1], summed over layers; rows name the bin in their channel column."""
    metric = f"gate_histogram[{position}]"
    rows = [{"series": one.name, **edges} for one in results for edges in histogram_bins(one, metric)]
    if not rows:
        return []
    score, share = Column("low", "gate score", ".2f"), Column("share", "share of scores", ".1%")
    chart = histogram(rows, score, "high", share, _series(results, rows), f"Gates at {position}, all scores")
    caption = (
        "Over all layers, tokens, heads and, for an elementwise gate, channels; scores beyond are in the end bins."
    )
    return [Figure(chart, caption, "Counts of 20 equal bins of [0, 1].", _context_line(results))]


def _context_line(results: Results) -> str:
    """What the figures depend on, in one line: what the models share, then what differs, under their names."""
    parts = {result.name: context_parts(result.context, figures.CONTEXT_TEXTS) for result in results}
    shared = [part for part in parts[results[0].name] if all(part in one for one in parts.values())]
    own = [
        f"{name}: {'; '.join(part for part in one if part not in shared)}"
        for name, one in parts.items()
        if set(one) - set(shared)
    ]
    return ". ".join(filter(None, ["; ".join(shared), *own]))


def _context_table(results: Results) -> Table:
    contexts = [flattened(result.context) for result in results]
    keys = dict.fromkeys(key for context in contexts for key in context)
    columns = [Column("key", ""), *(Column(str(number), one.name) for number, one in enumerate(results))]
    rows = [
        {"key": key.replace("_", " "), **{str(number): context.get(key) for number, context in enumerate(contexts)}}
        for key in keys
    ]
    return Table(columns, rows, "How each model was measured.")

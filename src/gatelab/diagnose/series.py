"""Rows for drawing: the results of one model or two, brought onto the same layers, heads and series."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from gatelab.diagnose.results import ALL_QUERIES, NamedResult

DrawnRow = dict[str, Any]
Results = Sequence[NamedResult]


class TopKey(NamedTuple):
    """A key position, the share of the heads that attend to it most, and their mean attention to it."""

    position: int
    num_heads: int
    share_of_heads: float
    attention: float


def series_name(results: Results, result: NamedResult, label: str) -> str:
    """A series' name: the model, what of it, or both, as far as needed to tell series apart."""
    if not label:
        return result.name
    return label if len(results) == 1 else f"{result.name}, {label}"


def layer_series(results: Results, metrics: Mapping[str, str], query_range: str = ALL_QUERIES) -> list[DrawnRow]:
    """One row for each model, metric and layer: ``series``, ``layer``, ``value``, and the heads' ``low`` and ``high``.

    ``metrics`` maps a label to a metric; an empty label leaves the model's name alone. A metric that repeats an earlier
    one, such as the gated output of a model without gates, is left out.
    """
    rows = []
    seen: dict[str, list[dict[int, float]]] = defaultdict(list)
    for label, metric in metrics.items():
        for result in results:
            layers = result.by_layer(metric, query_range)
            if layers in seen[result.name]:
                continue
            seen[result.name].append(layers)
            heads: dict[int, list[float]] = defaultdict(list)
            for (layer, _), value in result.by_head(metric, query_range).items():
                heads[layer].append(value)
            for layer, value in layers.items():
                spread = heads[layer] or [value]
                name = series_name(results, result, label)
                rows.append({"series": name, "layer": layer, "value": value, "low": min(spread), "high": max(spread)})
    return rows


def floor_series(results: Results, metric: str, query_range: str = ALL_QUERIES) -> float | list[DrawnRow] | None:
    """The floor of a metric: one number where it is the same everywhere, else rows as of :func:`layer_series`."""
    rows = []
    for result in results:
        name = f"{result.name}, uniform" if len(results) > 1 else "uniform attention"
        for layer, floor in result.by_layer(metric, query_range, column="floor").items():
            rows.append({"series": name, "layer": layer, "value": floor, "low": floor, "high": floor})
    floors = [row["value"] for row in rows]
    if not floors:
        return None
    return fmean(floors) if max(floors) - min(floors) <= 1e-6 * max(floors) else rows


def head_grid(results: Results, metric: str, label: str = "") -> list[DrawnRow]:
    """One row for each model with the metric, and each layer and head of any of them: ``panel layer head value``.

    A model's missing layers and heads have the value ``None``, so that panels share their axes.
    """
    values = {result.name: result.by_head(metric) for result in results}
    layers = sorted({layer for cells in values.values() for layer, _ in cells})
    heads = sorted({head for cells in values.values() for _, head in cells})
    return [
        {
            "panel": series_name(results, result, label),
            "layer": layer,
            "head": head,
            "value": values[result.name].get((layer, head)),
        }
        for result in results
        if values[result.name]
        for layer in layers
        for head in heads
    ]


def target_shares(results: Results, targets: Mapping[str, str]) -> list[DrawnRow]:
    """Rows ``target series share``: mean attention of each model to each kind of key, then the floors.

    ``targets`` maps a kind to its metric. Where all models have the same floors these are one series.
    """
    floors = {one.name: {kind: one.mean(metric, column="floor") for kind, metric in targets.items()} for one in results}
    first = floors[results[0].name]
    shared = all(math.isclose(one[kind] or 0, first[kind] or 0) for one in floors.values() for kind in targets)
    series = {"uniform attention": results[0]} if shared else {f"{one.name}, uniform": one for one in results}
    measured = "measured" if len(results) == 1 else ""
    rows = []
    for kind, metric in targets.items():
        shares = {series_name(results, one, measured): one.mean(metric) for one in results}
        shares |= {name: floors[one.name][kind] for name, one in series.items()}
        rows += [
            {"target": kind, "series": name, "share": share} for name, share in shares.items() if share is not None
        ]
    return rows


def top_keys(result: NamedResult, most: int) -> list[TopKey]:
    """The key positions that are the favourite of most heads, by number of heads."""
    attention = result.by_head("top_key_attention")
    favourites = result.by_head("top_key")
    groups: dict[int, list[float]] = defaultdict(list)
    for place, position in favourites.items():
        if place in attention:
            groups[int(position)].append(attention[place])
    keys = [
        TopKey(position, len(masses), len(masses) / len(favourites), fmean(masses))
        for position, masses in groups.items()
    ]
    return sorted(keys, key=lambda key: (-key.num_heads, key.position))[:most]


def largest_values(result: NamedResult, most: int) -> list[DrawnRow]:
    """The layers with the largest hidden values, largest first, with place, runners-up, median and ratio."""
    places = {row["layer"]: row["channel"] for row in result.select("largest_activation")}
    columns = {
        "second": "second_activation",
        "third": "third_activation",
        "median": "median_activation",
        "token": "largest_activation_token",
    }
    others = {key: result.by_layer(metric) for key, metric in columns.items()}
    rows = []
    for layer, value in result.by_layer("largest_activation").items():
        row: DrawnRow = {key: values.get(layer) for key, values in others.items()}
        row["token"] = None if row["token"] is None else int(row["token"])
        row |= {"layer": layer, "largest": value, "channel": places[layer]}
        row["ratio"] = value / row["median"] if row["median"] else None
        rows.append(row)
    return sorted(rows, key=lambda row: -row["largest"])[:most]


def gate_shares(result: NamedResult, position: str) -> DrawnRow:
    """One gate's means by kind of query, its shares of low and high scores, its entropy and its correlations."""
    shares = ("gate_below_0.01", "gate_below_0.1", "gate_above_0.9", "gate_binary_entropy")
    correlations = ("gate_sink_correlation", "gate_attention_entropy_correlation")
    return {
        **{kind: result.mean(f"gate_mean[{position}]", kind) for kind in ("first_token", "rest")},
        **{figure: result.mean(f"{figure}[{position}]") for figure in (*shares, *correlations)},
    }


def histogram_bins(result: NamedResult, metric: str) -> list[DrawnRow]:
    """``low``, ``high`` and ``share`` of equal bins of [0, 1]; the counts of all rows of a bin are summed."""
    counts: dict[int, float] = defaultdict(float)
    for row in result.select(metric):
        counts[row["channel"]] += row["value"]
    width, total = 1 / len(counts) if counts else 0.0, sum(counts.values())
    return [
        {"low": number * width, "high": (number + 1) * width, "share": counts[number] / total}
        for number in sorted(counts)
    ]


def context_parts(context: Mapping[str, Any], texts: Mapping[str, str]) -> list[str]:
    """The values of a context that have a text, put into it, in the order of the texts; of a zero "no" and its key."""
    known = {key: text for key, text in texts.items() if context.get(key) is not None}
    return [text.format(context[key]) if context[key] else f"no {key}" for key, text in known.items()]


def flattened(context: Mapping[Any, Any], start: str = "") -> dict[str, str]:
    """A context's values as text under their keys; those of a nested mapping carry its key in front."""
    texts = {}
    for key, value in context.items():
        if isinstance(value, Mapping):
            texts |= flattened(value, f"{start}{key} ")
        elif isinstance(value, list | tuple):
            texts[f"{start}{key}"] = ", ".join(map(str, value))
        elif isinstance(value, bool):
            texts[f"{start}{key}"] = "yes" if value else "no"
        elif value is not None:
            texts[f"{start}{key}"] = f"{value:,}" if isinstance(value, int) else str(value)
    return texts

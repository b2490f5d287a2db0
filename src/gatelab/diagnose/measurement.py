"""The result of a measured pass: by layer and head, as a summary, as tidy rows, as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gatelab.diagnose.activations import HiddenStatistics
from gatelab.diagnose.gate_scores import GateStatistics, ScoreStatistics
from gatelab.diagnose.head_means import HeadFigure

SCHEMA_VERSION = 1
COLUMNS = ("model", "step", "layer", "head", "channel", "query_range", "metric", "value", "floor", "n")
_RANKS_OF_ACTIVATIONS = ("largest_activation", "second_activation", "third_activation")


@dataclass
class LayerMeasurement:
    """What was measured in one layer. ``figures`` are by head, and empty where there is no softmax attention."""

    layer: int
    figures: list[HeadFigure] = field(default_factory=list)
    gates: dict[str, GateStatistics] = field(default_factory=dict)
    hidden: HiddenStatistics | None = None

    def by_head(self, metric: str, query_range: str = "all") -> list[float] | None:
        """A figure of every head, or ``None`` where it was not measured."""
        for figure in self.figures:
            if (figure.metric, figure.query_range) == (metric, query_range):
                return figure.values
        return None

    def floor(self, metric: str, query_range: str = "all") -> float | None:
        """What uniform attention gives for a figure, mean over heads."""
        for figure in self.figures:
            if (figure.metric, figure.query_range) == (metric, query_range) and figure.floors is not None:
                return _mean(figure.floors)
        return None

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for JSON; ``first_token`` repeats first-token attention by head."""
        hidden = self.hidden
        return {
            "layer": self.layer,
            "first_token": self.by_head("first_token_attention"),
            "figures": [figure._asdict() for figure in self.figures],
            "gates": {position: _gate_mapping(gate) for position, gate in self.gates.items()},
            "hidden": None if hidden is None else _hidden_mapping(hidden),
        }


@dataclass(frozen=True)
class Measurement:
    """What passes over one model measured, layer by layer, with the context that the figures depend on.

    ``layers`` are those with softmax attention; ``skipped`` names the others with the reason, and ``other_layers`` has
    their outputs. ``embedding`` is what the first layer reads. ``query_sets`` names the sets of queries that have
    figures of their own, ``delimiters`` the tokens to which attention was measured.
    """

    layers: list[LayerMeasurement]
    context: dict[str, Any]
    embedding: LayerMeasurement | None = None
    other_layers: list[LayerMeasurement] = field(default_factory=list)
    skipped: dict[int, str] = field(default_factory=dict)
    query_sets: tuple[str, ...] = ()
    delimiters: tuple[str, ...] = ()

    def mean(self, metric: str, query_range: str = "all") -> float | None:
        """A figure's mean over heads, then layers."""
        means = self.layer_means(metric, query_range)
        return _mean(means) if means else None

    def layer_means(self, metric: str, query_range: str = "all") -> list[float]:
        """A figure's mean over heads, of each layer that has it."""
        found = [layer.by_head(metric, query_range) for layer in self.layers]
        return [_mean(values) for values in found if values]

    @property
    def floor(self) -> float | None:
        """First-token attention of uniform attention over the same queries, mean over layers."""
        return self._floor("first_token_attention")

    def _floor(self, metric: str, query_range: str = "all") -> float | None:
        floors = [layer.floor(metric, query_range) for layer in self.layers]
        found = [floor for floor in floors if floor is not None]
        return _mean(found) if found else None

    @property
    def layer_outputs(self) -> list[HiddenStatistics]:
        """The outputs of all layers, those without softmax attention too, in order."""
        layers = sorted([*self.layers, *self.other_layers], key=lambda one: one.layer)
        return [layer.hidden for layer in layers if layer.hidden is not None]

    @property
    def gate_mean(self) -> float | None:
        """Mean gate score over layers and positions; ``None`` for an ungated model."""
        return self._mean_of_gates(lambda gate: gate.whole.mean)

    def _mean_of_gates(self, figure: Callable[[GateStatistics], float | None]) -> float | None:
        """A figure's mean over the gates of all layers and positions that have it; ``None`` where none has."""
        found = [figure(gate) for layer in self.layers for gate in layer.gates.values()]
        known = [value for value in found if value is not None]
        return _mean(known) if known else None

    def summary(self) -> dict[str, float | int | None]:
        """The figures that are logged during training, by name.

        ``first_token_attention`` is the paper's F-Attn and ``mean_activation_maximum`` its M-Act: the largest |h| of
        each layer's output, averaged over layers; ``activation_ratio`` is the largest |h| in medians of its layer, and
        ``activation_kurtosis`` the mean over layers. ``gated_output_effective_rank`` is that of what the output
        projection reads of each head, and ``attention_entropy`` in nats, both mean over heads, then layers. Those of
        gates are defined at :class:`~gatelab.diagnose.gate_scores.ScoreStatistics`, mean over layers and positions, and
        ``gate_attention_entropy_correlation`` is over the heads and queries of a layer. Of a query set NAME there are
        ``first_token_attention[NAME]``, its floor, the attention to a learned sink and the mean gate score; of a
        delimiter NAME the attention to it and its floor.
        """
        first_token = self.layer_means("first_token_attention")
        maxima = [hidden.value for hidden in self.layer_outputs]
        ratios = [hidden.ratio for hidden in self.layer_outputs if hidden.ratio is not None]
        kurtosis = [hidden.kurtosis for hidden in self.layer_outputs]
        return {
            "first_token_attention": _mean(first_token) if first_token else None,
            "first_token_attention_worst_layer": max(first_token, default=None),
            "first_token_attention_floor": self.floor,
            "sink_rate": self.mean("sink_rate"),
            "largest_activation": max(maxima, default=None),
            "mean_activation_maximum": _mean(maxima) if maxima else None,
            "activation_ratio": max(ratios, default=None),
            "activation_kurtosis": _mean(kurtosis) if kurtosis else None,
            "gated_output_effective_rank": self.mean("gated_output_effective_rank"),
            "attention_entropy": self.mean("attention_entropy"),
            "gate_mean": self.gate_mean,
            "gate_binary_entropy": self._mean_of_gates(lambda gate: gate.whole.binary_entropy),
            "gate_histogram_entropy": self._mean_of_gates(lambda gate: gate.whole.histogram_entropy),
            "gate_attention_entropy_correlation": self._mean_of_gates(_entropy_correlation),
            "measured_tokens": self.context["tokens"],
            **{key: value for name in self.query_sets for key, value in self._of_query_set(name)},
            **{key: value for name in self.delimiters for key, value in self._of_delimiter(name)},
        }

    def _of_delimiter(self, name: str) -> Iterator[tuple[str, float | None]]:
        yield f"delimiter_attention[{name}]", self.mean(f"delimiter_attention[{name}]")
        yield f"delimiter_attention_floor[{name}]", self._floor(f"delimiter_attention[{name}]")

    def _of_query_set(self, name: str) -> Iterator[tuple[str, float | None]]:
        yield f"first_token_attention[{name}]", self.mean("first_token_attention", name)
        yield f"first_token_attention_floor[{name}]", self._floor("first_token_attention", name)
        yield f"learned_sink_attention[{name}]", self.mean("learned_sink_attention", name)
        figures = [figure for layer in self.layers for figure in layer.figures if figure.query_range == name]
        means = [_mean(figure.values) for figure in figures if figure.metric.startswith("gate_mean[")]
        yield f"gate_mean[{name}]", _mean(means) if means else None

    def to_mapping(self) -> dict[str, Any]:
        """Everything, as plain values for JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "summary": self.summary(),
            "context": self.context,
            "floor": self.floor,
            "layers": [layer.to_mapping() for layer in self.layers],
            "other_layers": [layer.to_mapping() for layer in self.other_layers],
            "embedding": None if self.embedding is None else self.embedding.to_mapping(),
            "skipped": {str(layer): reason for layer, reason in self.skipped.items()},
        }

    def rows(self, model: str, step: int | None = None) -> list[dict[str, Any]]:
        """Tidy rows with the columns of ``COLUMNS``: one figure of one layer, or of one of its heads, in each.

        The embedding is layer -1. ``head`` is empty for what concerns a whole layer; ``channel`` is that of an
        activation. Tokens and key positions are values of rows of their own.
        """
        layers = [*self.layers, *self.other_layers, *([self.embedding] if self.embedding else [])]
        blank = {**dict.fromkeys(COLUMNS), "model": model, "step": step, "query_range": "all"}
        return [
            {**blank, "layer": layer.layer, **row}
            for layer in sorted(layers, key=lambda one: one.layer)
            for row in _layer_rows(layer)
        ]


def _layer_rows(layer: LayerMeasurement) -> Iterator[dict[str, Any]]:
    for figure in layer.figures:
        floors = figure.floors or [None] * len(figure.values)
        for head, (value, floor) in enumerate(zip(figure.values, floors, strict=True)):
            yield {
                "head": head,
                "query_range": figure.query_range,
                "metric": figure.metric,
                "value": value,
                "floor": floor,
                "n": figure.n,
            }
    for position, gate in layer.gates.items():
        yield from _gate_rows(position, gate)
    if layer.hidden is not None:
        yield from _hidden_rows(layer.hidden)


def _gate_rows(position: str, gate: GateStatistics) -> Iterator[dict[str, Any]]:
    yield from _score_rows(position, gate.whole, None)
    if len(gate.by_head) > 1:
        for head, scores in enumerate(gate.by_head):
            yield from _score_rows(position, scores, head)
    for head, correlation in enumerate(gate.sink_correlation):
        if correlation is not None:
            metric = f"gate_sink_correlation[{position}]"
            yield {"head": head, "metric": metric, "value": correlation, "n": gate.queries}
    if gate.entropy_correlation is not None:
        whole, by_head, queries = gate.entropy_correlation
        for head, correlation in ((None, whole), *enumerate(by_head)):
            if correlation is not None:
                metric = f"gate_attention_entropy_correlation[{position}]"
                yield {"head": head, "metric": metric, "value": correlation, "n": queries}


def _score_rows(position: str, scores: ScoreStatistics, head: int | None) -> Iterator[dict[str, Any]]:
    ranges = (
        ("all", scores.mean, scores.n),
        ("first_token", scores.first_token_mean, scores.first_token_n),
        ("rest", scores.rest_mean, scores.n - scores.first_token_n),
    )
    for query_range, value, n in ranges:
        if value is not None:
            metric = f"gate_mean[{position}]"
            yield {"head": head, "query_range": query_range, "metric": metric, "value": value, "n": n}
    figures: Mapping[str, float | None] = {
        "gate_below_0.01": scores.below_hundredth,
        "gate_below_0.1": scores.below_tenth,
        "gate_above_0.9": scores.above_nine_tenths,
        "gate_shut": scores.is_shut,
        "gate_sparse": scores.is_sparse,
        "gate_binary_entropy": scores.binary_entropy,
        "gate_histogram_entropy": scores.histogram_entropy,
    }
    for metric, value in figures.items():
        if value is not None:
            yield {"head": head, "metric": f"{metric}[{position}]", "value": float(value), "n": scores.n}


def _hidden_rows(hidden: HiddenStatistics) -> Iterator[dict[str, Any]]:
    for name, one in zip(_RANKS_OF_ACTIVATIONS, hidden.largest, strict=False):
        yield {"channel": one.channel, "metric": name, "value": one.value, "n": hidden.tokens}
        yield {"channel": one.channel, "metric": f"{name}_token", "value": float(one.token), "n": hidden.tokens}
    figures = {
        "median_activation": hidden.median,
        "activation_ratio": hidden.ratio,
        "share_above_100": hidden.share_above_100,
        "share_above_1000_medians": hidden.share_above_1000_medians,
        "activation_kurtosis": hidden.kurtosis,
        "residual_norm": hidden.residual_norm,
    }
    for metric, value in figures.items():
        if value is not None:
            yield {"metric": metric, "value": value, "n": hidden.tokens}


def _hidden_mapping(hidden: HiddenStatistics) -> dict[str, Any]:
    first = hidden.largest[0]
    largest = [one._asdict() for one in hidden.largest]
    return {**hidden._asdict(), "largest": largest, **first._asdict(), "ratio": hidden.ratio}


def _gate_mapping(gate: GateStatistics) -> dict[str, Any]:
    return {
        **gate.whole._asdict(),
        "by_head": [head._asdict() for head in gate.by_head],
        "sink_correlation": gate.sink_correlation,
        "attention_entropy_correlation": gate.entropy_correlation and gate.entropy_correlation._asdict(),
        "tokens": gate.tokens,
        "queries": gate.queries,
    }


def _entropy_correlation(gate: GateStatistics) -> float | None:
    return gate.entropy_correlation.whole if gate.entropy_correlation else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)

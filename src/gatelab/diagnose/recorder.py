"""What a measured pass leaves behind: numbers, never maps, added up over as many passes as come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gatelab.diagnose.activations import HiddenTotals
from gatelab.diagnose.attention import widened
from gatelab.diagnose.calls import AttentionCall
from gatelab.diagnose.entropy import attention_entropy
from gatelab.diagnose.gate_scores import GateStatistics, GateTotals
from gatelab.diagnose.head_means import HeadFigure, HeadMean
from gatelab.diagnose.measurement import LayerMeasurement
from gatelab.diagnose.patterns import PatternTotals
from gatelab.diagnose.query_sets import QuerySets, QuerySetTotals
from gatelab.diagnose.rank import (
    CovarianceTotals,
    effective_rank,
    output_factors,
    stable_rank,
    value_output_singular_values,
)
from gatelab.diagnose.sinks import EffectiveSinkTotals, SinkTotals

EMBEDDING = -1


class Recorder:
    """Receives each attention layer's call (``record``) and each layer's output (``record_hidden``).

    ``full`` adds what costs up to two more forward passes: whole maps in blocks, effective sinks, ranks of weights.
    ``delimiters`` maps names to token ids, attention to which is read from whole maps in blocks, ``full`` or not.
    ``first_tokens`` is the k of the attention to the first k tokens; ``skipped_queries`` are the numbers of first
    queries that first-token attention is also given without.
    What attaches a recorder to a model may set ``expected_layers``, the number of layers that the model has.
    """

    def __init__(
        self,
        full: bool = False,
        first_tokens: int = 4,
        skipped_queries: Sequence[int] = (1, 64),
        delimiters: Mapping[str, Sequence[int]] | None = None,
    ):
        self.full, self.first_tokens, self.skipped_queries = full, first_tokens, tuple(skipped_queries)
        self.delimiters = {name: frozenset(ids) for name, ids in (delimiters or {}).items()}
        self.expected_layers: int | None = None
        self.skipped: dict[int, str] = {}
        self.tokens: Int[Tensor, "B T"] | None = None
        self.real: Bool[Tensor, "B T"] | None = None
        self.documents: Int[Tensor, "B T"] | None = None
        self.query_sets: QuerySets = {}
        self._layers: dict[int, _LayerTotals] = {}
        self._hidden: dict[int, HiddenTotals] = {}

    def start(
        self,
        tokens: Int[Tensor, "B T"],
        real: Bool[Tensor, "B T"] | None = None,
        documents: Int[Tensor, "B T"] | None = None,
        query_sets: QuerySets | None = None,
    ) -> None:
        """Say what the next pass reads: its tokens, which of them are not padding, and the document of each.

        ``query_sets`` says of named sets which queries are in them.
        """
        self.tokens, self.real, self.documents, self.query_sets = tokens, real, documents, query_sets or {}

    @torch.no_grad()
    def record(self, call: AttentionCall) -> None:
        """Measure one attention layer in one pass."""
        totals = self._layers.setdefault(call.layer, _LayerTotals(self))
        totals.add(call, self.tokens, self.query_sets)

    @torch.no_grad()
    def record_hidden(
        self, layer: int, hidden: Float[Tensor, "B T D"], real: Bool[Tensor, "B T"] | None = None
    ) -> None:
        """Measure one layer's output, the residual stream after it; ``EMBEDDING`` (-1) is what layer 0 reads."""
        self._hidden.setdefault(layer, HiddenTotals()).add(hidden, self.real if real is None else real)

    def skip(self, layer: int, reason: str) -> None:
        """Name a layer that has no softmax attention; its output may be recorded all the same."""
        self.skipped[layer] = reason

    def missing_layers(self) -> list[int]:
        """Expected layers whose attention was neither recorded nor skipped."""
        return [
            layer
            for layer in range(self.expected_layers or 0)
            if layer not in self._layers and layer not in self.skipped
        ]

    def measurements(self) -> tuple[list[LayerMeasurement], LayerMeasurement | None]:
        """The layers in order, those without softmax attention with their outputs only; and the embedding."""
        numbers = sorted({*self._layers, *self._hidden} - {EMBEDDING})
        layers = [self._measurement(number) for number in numbers]
        return layers, self._measurement(EMBEDDING) if EMBEDDING in self._hidden else None

    def _measurement(self, layer: int) -> LayerMeasurement:
        totals, hidden = self._layers.get(layer), self._hidden.get(layer)
        return LayerMeasurement(
            layer=layer,
            figures=totals.figures() if totals else [],
            gates=totals.gate_statistics() if totals else {},
            hidden=hidden.statistics() if hidden else None,
        )


class _LayerTotals:
    """Everything that is added up about one attention layer."""

    def __init__(self, recorder: Recorder):
        self.full = recorder.full
        self.with_maps = recorder.full or bool(recorder.delimiters)
        self.sinks = SinkTotals(recorder.first_tokens, recorder.skipped_queries)
        self.query_sets = QuerySetTotals()
        self.gates: dict[str, GateTotals] = {}
        self.entropy, self.magnitude, self.gated_magnitude = HeadMean(), HeadMean(), HeadMean()
        self.patterns = PatternTotals(recorder.delimiters)
        self.effective_sink = EffectiveSinkTotals()
        self.covariance, self.gated_covariance = CovarianceTotals(), CovarianceTotals()
        self.output_factors: Float[Tensor, "H Cr Cv"] | None = None
        self.weight_ranks: list[HeadFigure] = []

    def add(self, call: AttentionCall, tokens: Int[Tensor, "B T"] | None, query_sets: QuerySets) -> None:
        real = call.visibility.real_queries(call.query.device)
        gated = call.output if call.gated_output is None else call.gated_output
        on_first, sees_first = self.sinks.add(call)
        self.query_sets.add(call, query_sets)
        self.magnitude.add(_magnitude(call.output), real)
        self.gated_magnitude.add(_magnitude(gated), real)
        self.covariance.add(call.output, real)
        self.gated_covariance.add(gated, real)
        self._add_gates(call, on_first, sees_first, real)
        self._add_entropy(call, real)
        if self.with_maps:
            self.patterns.add(call, tokens)
        if self.full:
            self._add_weights(call)
            if self.output_factors is not None:
                self.effective_sink.add(call, self.output_factors)

    def _add_gates(
        self,
        call: AttentionCall,
        on_first: Float[Tensor, "B H T"],
        sees_first: Bool[Tensor, "#B T"],
        real: Bool[Tensor, "#B T"],
    ) -> None:
        device = call.query.device
        is_first = call.visibility.query_positions(device) == call.visibility.first_key(device)
        for position, scores in call.scores.items():
            added = position in call.added
            gate = self.gates.setdefault(position, GateTotals(call.activations.get(position), added))
            gate.add(scores, real, is_first & real, len(call.query))
            gate.add_pairs(scores, on_first, sees_first & ~is_first)

    def _add_entropy(self, call: AttentionCall, real: Bool[Tensor, "#B T"]) -> None:
        entropy, num_visible = attention_entropy(call), call.visibility.num_visible(real.device)
        self.entropy.add(entropy, real & (num_visible > 0), num_visible.clamp(min=1).double().log())
        for position, scores in call.scores.items():
            self.gates[position].add_entropies(scores, entropy, real & (num_visible > 1))

    def _add_weights(self, call: AttentionCall) -> None:
        if self.output_factors is not None or call.output_weight is None:
            return
        num_heads = call.query.shape[2]
        self.output_factors = output_factors(call.output_weight, num_heads)
        if call.value_weight is not None:
            values = value_output_singular_values(call.value_weight, call.output_weight, num_heads, call.value.shape[2])
            for name, rank in (("effective", effective_rank), ("stable", stable_rank)):
                self.weight_ranks.append(HeadFigure(f"vo_{name}_rank", "all", rank(values).tolist(), None, 1))

    def figures(self) -> list[HeadFigure]:
        """All figures by head.

        ``output_magnitude``, before and after the gate, is mean |o| over real queries; ``attention_entropy`` is the
        mean of -sum_j A_ij log A_ij in nats over queries that see a key, and beside it that of log(visible keys).
        """
        found = [*self.sinks.figures(), *self.query_sets.figures()]
        found += self.magnitude.figures("output_magnitude")
        found += self.gated_magnitude.figures("gated_output_magnitude")
        found += self.entropy.figures("attention_entropy")
        found += self.covariance.figures("output")
        found += self.gated_covariance.figures("gated_output")
        if self.with_maps:
            found += self.patterns.figures()
        if self.full:
            found += self.effective_sink.figures()
            found += self.weight_ranks
        return found

    def gate_statistics(self) -> dict[str, GateStatistics]:
        """The gates' statistics by position."""
        found = {position: gate.statistics() for position, gate in self.gates.items()}
        return {position: one for position, one in found.items() if one is not None}


def _magnitude(output: Float[Tensor, "B T H Cv"]) -> Float[Tensor, "B H T"]:
    return widened(output).abs().mean(-1).transpose(1, 2)

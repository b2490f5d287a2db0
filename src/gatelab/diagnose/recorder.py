"""What an attention layer hands over during a measured pass, and what is kept of it: numbers, never maps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from gatelab.diagnose.activations import LargestActivation, largest_activation
from gatelab.diagnose.attention import key_mass, log_sum_exp
from gatelab.diagnose.gate_scores import GateStatistics, gate_statistics
from gatelab.diagnose.sinks import first_token_share, sink_rate


@dataclass
class LayerMeasurement:
    """What one pass measured in one layer; lists are by head."""

    first_token: list[float] = field(default_factory=list)
    first_token_after_first: list[float] = field(default_factory=list)
    sink_rate: list[float] = field(default_factory=list)
    output_magnitude: float = 0.0
    gated_output_magnitude: float = 0.0
    gates: dict[str, GateStatistics] = field(default_factory=dict)
    hidden: LargestActivation | None = None


class Recorder:
    """Receives each attention layer's tensors (``record``) and each layer's output (``record_hidden``).

    Whole sequences without padding are assumed: every query sees key 0.
    """

    def __init__(self, causal: bool = True):
        self.causal = causal
        self.layers: dict[int, LayerMeasurement] = {}

    def layer(self, index: int) -> LayerMeasurement:
        """The measurement of a layer, new at its first mention."""
        return self.layers.setdefault(index, LayerMeasurement())

    def record(self, layer: int, tensors: Mapping[str, Tensor], scores: Mapping[str, Tensor]) -> None:
        """Measure one attention layer: ``query`` (B T H C), ``key`` (B T K C), ``output`` and ``gated_output``."""
        query, key = tensors["query"], tensors["key"]
        scale = query.shape[-1] ** -0.5
        mass = key_mass(query, key, log_sum_exp(query, key, scale, causal=self.causal), scale)
        share = first_token_share(mass)
        measured = self.layer(layer)
        measured.first_token = share.mean(0).tolist()
        measured.first_token_after_first = first_token_share(mass, skipped=1).mean(0).tolist()
        measured.sink_rate = sink_rate(share).tolist()
        measured.output_magnitude = float(tensors["output"].float().abs().mean())
        measured.gated_output_magnitude = float(tensors["gated_output"].float().abs().mean())
        measured.gates = {position: gate_statistics(values) for position, values in scores.items()}

    def record_hidden(self, layer: int, hidden: Tensor) -> None:
        """Measure one layer's output (B T D), the residual stream after it."""
        self.layer(layer).hidden = largest_activation(hidden)

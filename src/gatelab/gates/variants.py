"""Every named gate, one line each: what the paper published, the grid around it, and what other projects ship.

The names are a contract: settings files, study arms and reports refer to them. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from gatelab.gates.spec import AttentionShape, GateSpec, OutputControl
from gatelab.settings import Settings, nearest


class Variant(Settings):
    """A way to gate attention: any number of gates on different tensors or a gate-free control, and its origin."""

    gates: tuple[GateSpec, ...] = ()
    control: OutputControl | None = None
    origin: str

    def num_parameters(self, shape: AttentionShape) -> int:
        """Parameters that the variant adds to one layer on which all its gates are."""
        control = shape.num_heads * shape.value_size if self.control and self.control.operation == "rms_norm" else 0
        return control + sum(gate.num_parameters(shape) for gate in self.gates)


def find_variant(name: str) -> Variant:
    """The variant with this name; a ``ValueError`` with the nearest name and the list for any other."""
    if name not in VARIANTS:
        raise ValueError(f"gate {name!r} is unknown; {nearest(name, VARIANTS)}")
    return VARIANTS[name]


def _one(origin: str, /, **axes: object) -> Variant:
    return Variant(gates=(GateSpec.parse(axes),), origin=origin)


def _two(origin: str, /, *axes: Mapping[str, object]) -> Variant:
    return Variant(gates=tuple(GateSpec.parse(one) for one in axes), origin=origin)


def _control(origin: str, /, operation: Literal["rms_norm", "silu"]) -> Variant:
    return Variant(control=OutputControl(operation=operation), origin=origin)


_HEADWISE = {"granularity": "headwise"}
_SHARED = {"sharing": "head_shared"}
_ADDITIVE_SILU = {"operation": "add", "activation": "silu"}
_INPUT_INDEPENDENT = {"source": "parameter", "initialization": "zeros"}
_BEFORE_NORM = {"placement": "before_norm"}
_PREFIX = {"source": "prefix", "initialization": "zeros"}
_IDENTITY_START = {"activation": "double_sigmoid", "initialization": "zeros"}

# fmt: off
VARIANTS: dict[str, Variant] = {
    # Published rows; "T1 r5" is row 5 of table 1.
    "none": Variant(origin="T1 r1, T2: baseline"),
    "sdpa_elementwise": _one("T1 r5, T2, T3, T4 (G1)"),
    "value_elementwise": _one("T1 r6, T3, T4 (G2)", position="value"),
    "key_elementwise": _one("T1 r7 (G3)", position="key"),
    "query_elementwise": _one("T1 r8 (G4)", position="query"),
    "dense_output_elementwise": _one("T1 r9 (G5)", position="dense_output"),
    "sdpa_headwise": _one("T1 r10, T2, T4 (G1)", **_HEADWISE),
    "value_headwise": _one("T1 r11, T6 (G2)", position="value", **_HEADWISE),
    "sdpa_head_shared": _one("T1 r12, T4 (G1)", **_SHARED),
    "value_head_shared": _one("T1 r13 (G2)", position="value", **_SHARED),
    "sdpa_additive_silu": _one("T1 r14, T3 (G1)", **_ADDITIVE_SILU),
    "sdpa_silu": _one("T1 r15 (G1)", activation="silu"),
    "rms_norm_on_sdpa": _control("T3: SDPA GroupNorm, no gate", "rms_norm"),
    "silu_on_sdpa": _control("T3: SDPA SiLU, no gate", "silu"),
    "sdpa_additive_identity": _one("T3 (G1)", operation="add", activation="identity"),
    "sdpa_input_independent": _one("T4 (G1)", **_INPUT_INDEPENDENT),
    "sdpa_ns_sigmoid": _one("T4 (G1)", activation="ns_sigmoid"),
    # The grid around the published rows.
    "key_headwise": _one("grid (G3)", position="key", **_HEADWISE),
    "query_headwise": _one("grid (G4)", position="query", **_HEADWISE),
    "key_head_shared": _one("grid (G3)", position="key", **_SHARED),
    "query_head_shared": _one("grid (G4)", position="query", **_SHARED),
    "sdpa_headwise_shared": _one("grid (G1): one score for a token", **_HEADWISE, **_SHARED),
    "value_headwise_shared": _one("grid (G2): one score for a token", position="value", **_HEADWISE, **_SHARED),
    "sdpa_head_shared_logits": _one("grid (G1): mean before the activation", **_SHARED, averaging="before_activation"),
    "query_before_norm": _one("grid (G4)", position="query", **_BEFORE_NORM),
    "query_after_rope": _one("grid (G4)", position="query", placement="after_rope"),
    "key_before_norm": _one("grid (G3)", position="key", **_BEFORE_NORM),
    "key_after_rope": _one("grid (G3)", position="key", placement="after_rope"),
    "query_headwise_before_norm": _one("grid (G4): no-op if q/k norm", position="query", **_HEADWISE, **_BEFORE_NORM),
    "key_headwise_before_norm": _one("grid (G3): no-op if q/k norm", position="key", **_HEADWISE, **_BEFORE_NORM),
    "sdpa_headwise_silu": _one("grid (G1)", activation="silu", **_HEADWISE),
    "sdpa_headwise_ns_sigmoid": _one("grid (G1)", activation="ns_sigmoid", **_HEADWISE),
    "sdpa_headwise_additive_silu": _one("grid (G1)", **_HEADWISE, **_ADDITIVE_SILU),
    "sdpa_headwise_input_independent": _one("grid (G1)", **_HEADWISE, **_INPUT_INDEPENDENT),
    "sdpa_additive_sigmoid": _one("grid (G1)", operation="add"),
    "sdpa_identity": _one("grid (G1): bilinear, no saturation", activation="identity"),
    "sdpa_tanh": _one("grid (G1): signed", activation="tanh"),
    "sdpa_low_rank": _one("grid (G1)", rank=16),
    "value_silu": _one("grid (G2)", position="value", activation="silu"),
    "value_ns_sigmoid": _one("grid (G2)", position="value", activation="ns_sigmoid"),
    "value_additive_silu": _one("grid (G2)", position="value", **_ADDITIVE_SILU),
    "value_input_independent": _one("grid (G2)", position="value", **_INPUT_INDEPENDENT),
    "dense_output_silu": _one("grid (G5)", position="dense_output", activation="silu"),
    "dense_output_additive_silu": _one("grid (G5)", position="dense_output", **_ADDITIVE_SILU),
    # What other projects ship.
    "sdpa_elementwise_float32": _one("Megatron-LM, OLMo-core: scores in float32", score_dtype="float32"),
    "sdpa_headwise_softplus": _one("Laguna", activation="softplus", score_dtype="float32", **_HEADWISE),
    "sdpa_headwise_identity_start": _one("Marin: 2 sigmoid from zero weights", **_HEADWISE, **_IDENTITY_START),
    "sdpa_elementwise_identity_start": _one("identity at the start, for gates added later", **_IDENTITY_START),
    "sdpa_headwise_prefix": _one("modded-nanogpt: first 12 channels", prefix_channels=12, **_HEADWISE, **_PREFIX),
    "sdpa_headwise_open": _one("x-transformers: open at the start", bias=10.0, initialization="zeros", **_HEADWISE),
    "sdpa_from_output": _one("x-transformers, HyGA: gate from the attention output", source="attention_output"),
    "sdpa_headwise_from_output": _one("gate from the attention output", source="attention_output", **_HEADWISE),
    "sdpa_from_value": _one("VGA: gate from the value state", source="value"),
    "sdpa_headwise_from_value": _one("gate from the value state", source="value", **_HEADWISE),
    "sdpa_and_value": _two("G1 with G2", {}, {"position": "value"}),
    "sdpa_and_value_headwise": _two("G1 with G2", _HEADWISE, {"position": "value", **_HEADWISE}),
}
# fmt: on

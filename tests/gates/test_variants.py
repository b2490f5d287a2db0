"""The named gates: names are a contract, the paper's rows are all there, and they cost what the paper says."""

from __future__ import annotations

import re

import pytest

from gatelab.gates.gate import Gate, build_control
from gatelab.gates.spec import AttentionShape, GateSpec
from gatelab.gates.variants import VARIANTS, Variant, find_variant

SHAPE_15A2B = AttentionShape(width=2048, num_heads=32, num_kv_heads=4, head_size=128)
LAYERS_15A2B = 24

# A name may be added here, never changed or removed: settings files and reports of finished runs refer to it.
NAMES = [
    "none",
    "sdpa_elementwise",
    "value_elementwise",
    "key_elementwise",
    "query_elementwise",
    "dense_output_elementwise",
    "sdpa_headwise",
    "value_headwise",
    "sdpa_head_shared",
    "value_head_shared",
    "sdpa_additive_silu",
    "sdpa_silu",
    "rms_norm_on_sdpa",
    "silu_on_sdpa",
    "sdpa_additive_identity",
    "sdpa_input_independent",
    "sdpa_ns_sigmoid",
    "key_headwise",
    "query_headwise",
    "key_head_shared",
    "query_head_shared",
    "sdpa_headwise_shared",
    "value_headwise_shared",
    "sdpa_head_shared_logits",
    "query_before_norm",
    "query_after_rope",
    "key_before_norm",
    "key_after_rope",
    "query_headwise_before_norm",
    "key_headwise_before_norm",
    "sdpa_headwise_silu",
    "sdpa_headwise_ns_sigmoid",
    "sdpa_headwise_additive_silu",
    "sdpa_headwise_input_independent",
    "sdpa_additive_sigmoid",
    "sdpa_identity",
    "sdpa_tanh",
    "sdpa_low_rank",
    "value_silu",
    "value_ns_sigmoid",
    "value_additive_silu",
    "value_input_independent",
    "dense_output_silu",
    "dense_output_additive_silu",
    "sdpa_elementwise_float32",
    "sdpa_headwise_softplus",
    "sdpa_headwise_identity_start",
    "sdpa_elementwise_identity_start",
    "sdpa_headwise_prefix",
    "sdpa_headwise_open",
    "sdpa_from_output",
    "sdpa_headwise_from_output",
    "sdpa_from_value",
    "sdpa_headwise_from_value",
    "sdpa_and_value",
    "sdpa_and_value_headwise",
]

# The rows of table 1 that have a gate; rows 2 to 4 are wider baselines.
TABLE_1 = {
    1: "none",
    5: "sdpa_elementwise",
    6: "value_elementwise",
    7: "key_elementwise",
    8: "query_elementwise",
    9: "dense_output_elementwise",
    10: "sdpa_headwise",
    11: "value_headwise",
    12: "sdpa_head_shared",
    13: "value_head_shared",
    14: "sdpa_additive_silu",
    15: "sdpa_silu",
}
TABLE_3 = {
    "sdpa_elementwise",
    "value_elementwise",
    "sdpa_additive_silu",
    "rms_norm_on_sdpa",
    "silu_on_sdpa",
    "sdpa_additive_identity",
}
TABLE_4 = {
    "sdpa_elementwise",
    "sdpa_headwise",
    "sdpa_head_shared",
    "value_elementwise",
    "sdpa_input_independent",
    "sdpa_ns_sigmoid",
}
WORDS = {"G1": "sdpa_output", "G2": "value", "G3": "key", "G4": "query", "G5": "dense_output"}


def test_names_are_kept_in_their_order() -> None:
    assert list(VARIANTS) == NAMES
    assert len(VARIANTS) >= 36


def test_no_two_names_mean_the_same() -> None:
    meanings = [(variant.gates, variant.control) for variant in VARIANTS.values()]
    assert len(set(meanings)) == len(meanings)


def test_every_published_row_has_its_name() -> None:
    rows = {int(match[1]): name for name, v in VARIANTS.items() if (match := re.search(r"T1 r(\d+)", v.origin))}
    assert rows == TABLE_1
    assert {name for name, variant in VARIANTS.items() if "T3" in variant.origin} == TABLE_3
    assert {name for name, variant in VARIANTS.items() if "T4" in variant.origin} == TABLE_4


def test_position_words_match_the_papers_numbers() -> None:
    seen = set()
    for variant in VARIANTS.values():
        for number in re.findall(r"\((G\d)\)", variant.origin):
            seen.add(number)
            assert [gate.position for gate in variant.gates] == [WORDS[number]]
    assert seen == set(WORDS)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("sdpa_elementwise", {}),
        ("value_headwise", {"position": "value", "granularity": "headwise"}),
        ("sdpa_head_shared", {"sharing": "head_shared", "averaging": "after_activation"}),
        ("sdpa_additive_silu", {"operation": "add", "activation": "silu"}),
        ("sdpa_additive_identity", {"operation": "add", "activation": "identity"}),
        ("sdpa_input_independent", {"source": "parameter", "initialization": "zeros"}),
        ("sdpa_ns_sigmoid", {"activation": "ns_sigmoid"}),
        ("sdpa_headwise_softplus", {"granularity": "headwise", "activation": "softplus", "score_dtype": "float32"}),
        (
            "sdpa_headwise_prefix",
            {"granularity": "headwise", "source": "prefix", "prefix_channels": 12, "initialization": "zeros"},
        ),
        ("sdpa_from_output", {"source": "attention_output"}),
    ],
)
def test_name_means_these_axes(name: str, axes: dict[str, object]) -> None:
    assert VARIANTS[name].gates == (GateSpec.parse(axes),)
    assert VARIANTS[name].control is None


def test_two_gates_and_controls() -> None:
    assert VARIANTS["sdpa_and_value"].gates == (GateSpec(), GateSpec(position="value"))
    controls = {name: v.control.operation for name, v in VARIANTS.items() if v.control is not None}
    assert controls == {"rms_norm_on_sdpa": "rms_norm", "silu_on_sdpa": "silu"}
    assert not any(VARIANTS[name].gates for name in [*controls, "none"])


def test_named_gates_are_on_all_layers() -> None:
    """So that a variant's cost is its cost on one layer times the layers."""
    assert all(gate.layers is None for variant in VARIANTS.values() for gate in variant.gates)


@pytest.mark.parametrize(
    ("name", "added"),
    [
        ("none", 0),
        ("sdpa_elementwise", 201_326_592),
        ("value_elementwise", 25_165_824),
        ("key_elementwise", 25_165_824),
        ("query_elementwise", 201_326_592),
        ("dense_output_elementwise", 100_663_296),
        ("sdpa_headwise", 1_572_864),
        ("value_headwise", 196_608),
        ("sdpa_head_shared", 201_326_592),
        ("value_head_shared", 25_165_824),
        ("sdpa_input_independent", 24 * 32 * 128),
        ("rms_norm_on_sdpa", 24 * 32 * 128),
        ("silu_on_sdpa", 0),
        ("sdpa_and_value", 201_326_592 + 25_165_824),
    ],
)
def test_added_parameters_of_the_papers_mixture(name: str, added: int) -> None:
    """Table 1 prints 201, 25, 100, 1.6 and 0.2 million."""
    assert LAYERS_15A2B * VARIANTS[name].num_parameters(SHAPE_15A2B) == added


@pytest.mark.parametrize("name", VARIANTS)
def test_added_parameters_are_those_of_the_modules(name: str) -> None:
    shape, variant = AttentionShape(width=40, num_heads=6, num_kv_heads=2, head_size=8), VARIANTS[name]
    modules = [Gate(spec, shape) for spec in variant.gates] + [build_control(variant.control, shape, epsilon=1e-6)]
    assert variant.num_parameters(shape) == sum(p.numel() for module in modules for p in module.parameters())


def test_initial_scores() -> None:
    scores = {name: VARIANTS[name].gates[0].initial_score() for name in VARIANTS if VARIANTS[name].gates}
    expected = {
        "sdpa_elementwise": 0.5,
        "sdpa_input_independent": 0.5,
        "sdpa_silu": 0.0,
        "sdpa_additive_identity": 0.0,
        "sdpa_additive_silu": 0.0,
        "sdpa_tanh": 0.0,
        "sdpa_ns_sigmoid": 0.75,
        "sdpa_headwise_identity_start": 1.0,
        "sdpa_elementwise_identity_start": 1.0,
        "sdpa_headwise_softplus": 0.6931471805599453,
        "sdpa_headwise_open": 0.9999546021312976,
    }
    assert {name: scores[name] for name in expected} == pytest.approx(expected, rel=1e-15)


def test_variant_round_trips() -> None:
    for variant in VARIANTS.values():
        assert Variant.from_yaml(variant.to_yaml()) == variant


def test_unknown_name_is_refused_with_the_nearest() -> None:
    assert find_variant("sdpa_headwise") is VARIANTS["sdpa_headwise"]
    with pytest.raises(ValueError, match="gate 'sdpa_hedwise' is unknown; did you mean 'sdpa_headwise'") as refusal:
        find_variant("sdpa_hedwise")
    assert all(name in str(refusal.value) for name in VARIANTS)

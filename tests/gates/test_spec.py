"""The specification of a gate: what is refused and how, what is stored, and that it tells the truth about Gate."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gatelab.gates.gate import ACTIVATIONS, Gate
from gatelab.gates.reference import ACTIVATIONS as REFERENCE_ACTIVATIONS
from gatelab.gates.spec import POSITIVE_ACTIVATIONS, AttentionShape, GateSpec

SHAPE = AttentionShape(width=10, num_heads=6, num_kv_heads=2, head_size=4)

IMPOSSIBLE = [
    ({"position": "dense_output", "granularity": "headwise"}, "position=dense_output with granularity=headwise"),
    ({"position": "dense_output", "sharing": "head_shared"}, "position=dense_output with sharing=head_shared"),
    ({"position": "sdpa_output", "placement": "after_norm"}, "position=sdpa_output with placement=after_norm"),
    ({"position": "value", "placement": "before_norm"}, "position=value with placement=before_norm"),
    ({"position": "dense_output", "placement": "after_rope"}, "position=dense_output with placement=after_rope"),
    ({"position": "value", "source": "attention_output"}, "source=attention_output with position=value"),
    ({"position": "key", "source": "attention_output"}, "source=attention_output with position=key"),
    ({"position": "query", "source": "attention_output"}, "source=attention_output with position=query"),
    ({"source": "parameter", "initialization": "zeros", "rank": 3}, "source=parameter with rank=3"),
    ({"source": "parameter", "initialization": "zeros", "bias": 1.5}, "source=parameter with bias=1.5"),
    ({"source": "parameter"}, "source=parameter with initialization=normal"),
    ({"source": "prefix"}, "source=prefix with prefix_channels=None"),
    ({"source": "hidden", "prefix_channels": 12}, "source=hidden with prefix_channels=12"),
    ({"averaging": "before_activation"}, "sharing=head_specific with averaging=before_activation"),
    ({"layers": [1, 3, 1]}, "position=sdpa_output with layers=(1, 3, 1)"),
    ({"layers": []}, "position=sdpa_output with layers=()"),
    ({"layers": [-1]}, "position=sdpa_output with layers=(-1,)"),
]

AXES = st.fixed_dictionaries(
    {},
    optional={
        "position": st.sampled_from(["sdpa_output", "value", "key", "query", "dense_output"]),
        "granularity": st.sampled_from(["elementwise", "headwise"]),
        "sharing": st.sampled_from(["head_specific", "head_shared"]),
        "averaging": st.sampled_from(["after_activation", "before_activation"]),
        "operation": st.sampled_from(["multiply", "add"]),
        "activation": st.sampled_from(sorted(ACTIVATIONS)),
        "source": st.sampled_from(["hidden", "prefix", "parameter", "value", "attention_output"]),
        "prefix_channels": st.none() | st.integers(1, SHAPE.width),
        "placement": st.none() | st.sampled_from(["before_norm", "after_norm", "after_rope"]),
        "layers": st.none() | st.lists(st.integers(-1, 3), max_size=3),
        "rank": st.none() | st.integers(1, 5),
        "initialization": st.sampled_from(["normal", "zeros"]),
        "bias": st.none() | st.floats(-1e4, 1e4),
        "score_dtype": st.sampled_from(["activation", "float32"]),
    },
)


@pytest.mark.parametrize(("axes", "pair"), IMPOSSIBLE, ids=[pair for _, pair in IMPOSSIBLE])
def test_impossible_pair_is_refused_with_both_values(axes: dict[str, object], pair: str) -> None:
    with pytest.raises(ValueError) as refusal:
        GateSpec.parse(axes)
    assert str(refusal.value).startswith(f"{pair} is impossible: ")
    assert str(refusal.value).count("\n") == 0


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"activation": "sigmod"}, "activation cannot be 'sigmod'; did you mean 'sigmoid'?"),
        ({"positon": "value"}, "'positon' is unknown; did you mean 'position'?"),
        ({"rank": 0}, "rank cannot be 0: input should be greater than 0"),
        ({"bias": math.nan}, "bias cannot be nan: input should be a finite number"),
        ({"bias": math.inf}, "bias cannot be inf: input should be a finite number"),
        ({"schema_version": 2}, "schema_version cannot be 2; the choices are: 1"),
    ],
)
def test_wrong_key_or_value_is_named(axes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        GateSpec.parse(axes)
    assert str(refusal.value).startswith(message)


def test_default_is_the_published_best_gate() -> None:
    assert GateSpec().to_mapping() == {
        "schema_version": 1,
        "position": "sdpa_output",
        "granularity": "elementwise",
        "sharing": "head_specific",
        "averaging": "after_activation",
        "operation": "multiply",
        "activation": "sigmoid",
        "source": "hidden",
        "prefix_channels": None,
        "placement": None,
        "layers": None,
        "rank": None,
        "initialization": "normal",
        "bias": None,
        "score_dtype": "activation",
    }


def test_query_and_key_gates_stand_after_the_norm_unless_told_otherwise() -> None:
    for position in ("query", "key"):
        assert GateSpec(position=position).placement == "after_norm"
        assert GateSpec(position=position) == GateSpec(position=position, placement="after_norm")
        assert GateSpec(position=position, placement="after_rope").placement == "after_rope"
    for position in ("sdpa_output", "value", "dense_output"):
        assert GateSpec(position=position).placement is None


def test_specification_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        GateSpec().position = "value"


def test_yaml_names_every_axis_and_its_version_and_reads_back() -> None:
    spec = GateSpec(position="key", granularity="headwise", layers=(0, 2), rank=3, bias=-0.5, placement="before_norm")
    text = spec.to_yaml()
    assert text.startswith("schema_version: 1\nposition: key\ngranularity: headwise\n")
    assert GateSpec.from_yaml(text) == spec
    with pytest.raises(ValueError, match="schema_version cannot be 7; the choices are: 1"):
        GateSpec.from_yaml(text.replace("schema_version: 1", "schema_version: 7"))


@settings(max_examples=400, deadline=None)
@given(axes=AXES)
def test_any_axes_are_refused_by_two_names_or_describe_a_real_gate(axes: dict[str, object]) -> None:
    try:
        spec = GateSpec.parse(axes)
    except ValueError as refusal:
        assert_names_two_axes(str(refusal))
        event("refused")
        return
    assert GateSpec.from_yaml(spec.to_yaml()) == spec
    gate = Gate(spec, SHAPE)
    shapes = {name: tuple(parameter.shape) for name, parameter in gate.named_parameters()}
    assert spec.parameter_shapes(SHAPE) == shapes
    assert spec.num_parameters(SHAPE) == sum(parameter.numel() for parameter in gate.parameters())
    assert_runs(spec, gate)


def assert_names_two_axes(message: str) -> None:
    """``axis=value with axis=value is impossible: reason``, with axes that exist."""
    pair, _, reason = message.partition(" is impossible: ")
    assert reason and "\n" not in message
    names = [side.partition("=")[0] for side in pair.split(" with ")]
    assert len(set(names)) == 2 and set(names) <= set(GateSpec.model_fields)


def assert_runs(spec: GateSpec, gate: Gate) -> None:
    """Forward and backward: the gated tensor keeps its shape, and every parameter has a finite gradient."""
    for name, parameter in gate.named_parameters():
        torch.nn.init.constant_(parameter, spec.bias) if name.endswith("bias") else torch.nn.init.normal_(parameter)
    heads, head_size = spec.gated_shape(SHAPE)
    kv_channels, channels = SHAPE.num_kv_heads * SHAPE.head_size, SHAPE.num_heads * SHAPE.head_size
    sources = {
        "hidden": torch.randn(3, 5, SHAPE.width),
        "value": torch.randn(3, 5, kv_channels),
        "attention_output": torch.randn(3, 5, channels),
    }
    y = torch.randn(3, 5, heads, head_size, requires_grad=True)
    scores = gate.scores(sources)
    batch, length = (1, 1) if spec.source == "parameter" else (3, 5)
    assert scores.shape == (
        batch,
        length,
        1 if spec.sharing == "head_shared" else heads,
        1 if spec.granularity == "headwise" else head_size,
    )
    gated = gate(y, scores)
    assert gated.shape == y.shape
    gated.mean().backward()
    for parameter in [y, *gate.parameters()]:
        assert parameter.grad is not None and parameter.grad.isfinite().all()


@settings(deadline=None)
@given(activation=st.sampled_from(sorted(ACTIVATIONS)), bias=st.none() | st.floats(-30, 30))
def test_initial_score_is_the_activation_of_the_bias(activation: str, bias: float | None) -> None:
    spec = GateSpec.parse({"activation": activation, "bias": bias})
    logit = torch.tensor([bias or 0.0], dtype=torch.float64)
    expected = REFERENCE_ACTIVATIONS[activation](logit).item()
    assert spec.initial_score() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_initial_score_of_a_far_bias_does_not_overflow(activation: str) -> None:
    for bias in (-1e4, 1e4):
        assert math.isfinite(GateSpec.parse({"activation": activation, "bias": bias}).initial_score())


def test_exactly_positive_headwise_factors_before_the_norm_are_marked_as_cancelling() -> None:
    """That the marked ones do nothing is shown in test_gate.py by running them."""
    base = {"position": "key", "granularity": "headwise", "placement": "before_norm"}
    marked = {a for a in ACTIVATIONS if GateSpec.parse({**base, "activation": a}).cancels_under_norm()}
    assert marked == POSITIVE_ACTIVATIONS == {"sigmoid", "ns_sigmoid", "double_sigmoid", "softplus"}
    assert GateSpec.parse({**base, "sharing": "head_shared"}).cancels_under_norm()
    for change in ({"operation": "add"}, {"granularity": "elementwise"}, {"placement": "after_norm"}):
        assert not GateSpec.parse({**base, **change}).cancels_under_norm()


def test_gated_tensor_and_source_sizes() -> None:
    shape = AttentionShape(width=40, num_heads=6, num_kv_heads=2, head_size=8)
    gated = {p: GateSpec.parse({"position": p}).gated_shape(shape) for p in ("sdpa_output", "value", "key", "query")}
    assert gated == {"sdpa_output": (6, 8), "value": (2, 8), "key": (2, 8), "query": (6, 8)}
    assert GateSpec(position="dense_output").gated_shape(shape) == (1, 40)
    widths = {s: GateSpec.parse({"source": s}).source_width(shape) for s in ("hidden", "value", "attention_output")}
    assert widths == {"hidden": 40, "value": 16, "attention_output": 48}
    assert GateSpec(source="prefix", prefix_channels=12).source_width(shape) == 12


def test_layers_limit_a_gate() -> None:
    assert [GateSpec(layers=(0, 2)).on_layer(layer) for layer in range(4)] == [True, False, True, False]
    assert GateSpec().on_layer(77)


@pytest.mark.parametrize(
    "module", ["gatelab.settings", "gatelab.gates.spec", "gatelab.gates.variants", "gatelab.gates.catalogue"]
)
def test_names_load_without_torch(module: str) -> None:
    """So that --help and listings answer at once."""
    code = f"import sys, {module}; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

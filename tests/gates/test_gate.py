"""Gates inside the real attention block against the float64 oracle, and each property that a gate promises."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import get_args

import pytest
import torch
from attention_blocks import (
    ONE_WIDTH,
    SHAPE,
    B,
    T,
    block_settings,
    build_attention,
    hidden_states,
    rotation_for,
    run,
    run_reference,
)
from torch import Tensor

from gatelab.gates.gate import ACTIVATIONS, Gate
from gatelab.gates.reference import ACTIVATIONS as REFERENCE_ACTIVATIONS
from gatelab.gates.spec import Activation, AttentionShape, GateSpec, OutputControl
from gatelab.gates.variants import VARIANTS, Variant
from gatelab.model.decoder import DecoderLayer
from gatelab.model.settings import ModelSettings

TOLERANCE = 1e-10  # float64, gradients up to about 100

COMBINATIONS: dict[str, Variant] = {
    "gate_from_value_beside_value_gate": Variant(
        gates=(GateSpec(position="value"), GateSpec(source="value")), origin="the source is the ungated value"
    ),
    "gate_from_output_after_control": Variant(
        gates=(GateSpec(source="attention_output"),),
        control=OutputControl(operation="rms_norm"),
        origin="the source is the output before the control",
    ),
    "dense_gate_from_output_beside_sdpa_gate": Variant(
        gates=(GateSpec(), GateSpec(position="dense_output", source="attention_output")),
        origin="the source is the ungated output",
    ),
    "control_before_additive_gate": Variant(
        gates=(GateSpec(operation="add", activation="tanh"),), control=OutputControl(operation="silu"), origin="order"
    ),
    "all_positions": Variant(
        gates=tuple(GateSpec(position=p) for p in ("sdpa_output", "value", "key", "query", "dense_output")),
        origin="all five at once",
    ),
    "low_rank_with_bias_shared": Variant(
        gates=(GateSpec(position="value", rank=5, bias=0.5, sharing="head_shared", activation="silu"),), origin="axes"
    ),
    "prefix_with_bias_on_query": Variant(
        gates=(GateSpec(position="query", source="prefix", prefix_channels=7, bias=1.0, placement="after_rope"),),
        origin="axes",
    ),
    "key_from_value_additive_before_norm": Variant(
        gates=(GateSpec(position="key", source="value", operation="add", placement="before_norm"),), origin="axes"
    ),
    "shared_logits_input_independent": Variant(
        gates=(
            GateSpec(source="parameter", initialization="zeros", sharing="head_shared", averaging="before_activation"),
        ),
        origin="axes",
    ),
}
GATES = VARIANTS | COMBINATIONS
# Without q/k norm the rotation is partial too, so that both forms of each are met.
WITHOUT_NORM = ["none", *(name for name, variant in GATES.items() if any(g.placement for g in variant.gates))]
CASES = [(name, True, 1.0) for name in GATES] + [(name, False, 0.5) for name in WITHOUT_NORM]


def assert_equals_oracle(settings: ModelSettings) -> None:
    """Outputs, and gradients for the input and for every parameter."""
    attention, hidden = build_attention(settings), hidden_states(settings.width).requires_grad_()
    inputs = {"hidden": hidden, **dict(attention.named_parameters())}
    output, expected = run(settings, attention, hidden), run_reference(settings, attention, hidden)
    torch.testing.assert_close(output, expected, rtol=0, atol=TOLERANCE)
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((output * probe).sum(), list(inputs.values()))
    expected_gradients = torch.autograd.grad((expected * probe).sum(), list(inputs.values()))
    for name, gradient, expected_gradient in zip(inputs, gradients, expected_gradients, strict=True):
        error = (gradient - expected_gradient).abs().max()
        assert error < TOLERANCE, f"the gradient of {name} is off by {error:.1e}"


def scores_of(spec: GateSpec, sources: Mapping[str, Tensor], shape: AttentionShape = SHAPE) -> Tensor:
    """Scores of a gate with random weights."""
    gate = Gate(spec, shape).double()
    for parameter in gate.parameters():
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return gate.scores(sources)


class Recorder:
    """Keeps the gate scores of a pass."""

    scores: Mapping[str, Tensor]

    def record(self, layer: int, tensors: Mapping[str, Tensor], scores: Mapping[str, Tensor]) -> None:
        self.scores = dict(scores)


@pytest.mark.parametrize(("name", "qk_norm", "rope_fraction"), CASES, ids=lambda value: str(value))
def test_block_equals_oracle(name: str, qk_norm: bool, rope_fraction: float) -> None:
    variant = GATES[name]
    assert_equals_oracle(block_settings(variant.gates, variant.control, qk_norm, rope_fraction))


@pytest.mark.parametrize("name", VARIANTS)
def test_block_of_an_encoder_equals_oracle(name: str) -> None:
    variant = VARIANTS[name]
    assert_equals_oracle(block_settings(variant.gates, variant.control, causal=False))


@pytest.mark.parametrize("source", ["hidden", "value", "attention_output"])
def test_source_is_right_where_all_sources_have_one_width(source: str) -> None:
    """Hidden state, values and attention output are all 48 wide here, so no shape betrays a mix-up."""
    assert_equals_oracle(block_settings((GateSpec.parse({"source": source}),), shape=ONE_WIDTH))


def test_random_weights_tell_activations_apart() -> None:
    outputs = []
    for activation in ACTIVATIONS:
        settings = block_settings((GateSpec(activation=activation),))
        outputs.append(run(settings, build_attention(settings), hidden_states()))
    for one, another in itertools.combinations(outputs, 2):
        assert (one - another).abs().max() > 1e-2


def test_every_activation_has_its_literal_function_formula_and_initial_score() -> None:
    assert set(get_args(Activation)) == set(ACTIVATIONS) == set(REFERENCE_ACTIVATIONS)
    for activation in ACTIVATIONS:
        GateSpec(activation=activation).initial_score()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_equals_its_formula(activation: str) -> None:
    x = torch.linspace(-12, 12, 241, dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[activation](x), REFERENCE_ACTIVATIONS[activation](x), rtol=1e-12, atol=1e-12)


# What scores depend on


def test_two_tokens_get_different_gates_unless_input_independent() -> None:
    hidden = hidden_states()
    scores = scores_of(GateSpec(), {"hidden": hidden})
    assert scores.shape == (B, T, 6, 8)
    flat = scores.flatten(0, 1)
    assert ((flat[:, None] - flat[None]).abs().amax((2, 3)) > 1e-3).sum() == (B * T) * (B * T - 1)
    independent = scores_of(GateSpec(source="parameter", initialization="zeros"), {"hidden": hidden})
    assert independent.shape == (1, 1, 6, 8)


@pytest.mark.parametrize("name", GATES)
def test_first_token_does_not_see_later_ones(name: str) -> None:
    variant = GATES[name]
    settings = block_settings(variant.gates, variant.control)
    attention, hidden = build_attention(settings), hidden_states()
    attention.recorder = recorder = Recorder()
    changed = hidden.clone()
    changed[:, 1:] = hidden_states(seed=6)[:, 1:]
    output, scores = run(settings, attention, hidden), recorder.scores
    changed_output, changed_scores = run(settings, attention, changed), recorder.scores
    assert torch.equal(output[:, 0], changed_output[:, 0])
    assert set(scores) == {spec.position for spec in variant.gates}
    for position in scores:
        assert torch.equal(scores[position][:, 0], changed_scores[position][:, 0])
    assert (output[:, 1:] - changed_output[:, 1:]).abs().amax(-1).min() > 1e-3


def test_gate_reads_the_normed_hidden_state_that_feeds_q_k_and_v() -> None:
    settings = block_settings((GateSpec(), GateSpec(position="dense_output")))
    layer = DecoderLayer(settings, 0).double()
    torch.nn.init.normal_(layer.input_layernorm.weight)
    read: dict[str, Tensor] = {}

    def note(name: str):
        return lambda module, inputs: read.__setitem__(name, inputs[0])

    attention = layer.self_attn
    for name in ("q_proj", "k_proj", "v_proj", "gates.sdpa_output.projection", "gates.dense_output.projection"):
        attention.get_submodule(name).register_forward_pre_hook(note(name))
    x = 100 * hidden_states()
    layer(x, rotation_for(settings))
    assert len(read) == 5
    for tensor in read.values():
        assert tensor is read["q_proj"]
        assert torch.equal(tensor, layer.input_layernorm(x))


def test_a_gate_limited_to_layers_is_on_these_only() -> None:
    settings = block_settings((GateSpec(layers=(0, 2)), GateSpec(position="value", layers=(2,))))
    on_layer = [set(build_attention(settings, layer).gates) for layer in range(3)]
    assert on_layer == [{"sdpa_output"}, set(), {"sdpa_output", "value"}]
    plain, hidden = block_settings(), hidden_states()
    names = [name for name, _ in build_attention(settings, 1).named_parameters()]
    assert not any("gates" in name for name in names)
    expected = run(plain, build_attention(plain), hidden)
    assert torch.equal(run(settings, build_attention(settings, 1), hidden), expected)
    assert not torch.equal(run(settings, build_attention(settings, 0), hidden), expected)


# Granularity and sharing


def test_headwise_score_scales_its_own_head_even_when_heads_and_channels_are_equally_many() -> None:
    shape = AttentionShape(width=40, num_heads=8, num_kv_heads=2, head_size=8)
    gate = Gate(GateSpec(granularity="headwise"), shape)
    y = torch.ones(B, T, 8, 8)
    scores = gate.scores({"hidden": torch.randn(B, T, 40)})
    assert scores.shape == (B, T, 8, 1)
    gated = gate(y, scores)
    for head in range(8):
        for channel in range(8):
            assert torch.equal(gated[:, :, head, channel], scores[:, :, head, 0])


def test_elementwise_rows_are_head_major() -> None:
    gate = Gate(GateSpec(activation="identity"), SHAPE)
    weight = torch.zeros(48, 40)
    weight[2 * 8 + 5, 3] = 1.0
    gate.projection.weight.data = weight
    scores = gate.scores({"hidden": torch.ones(B, T, 40)})
    assert scores[0, 0].nonzero().tolist() == [[2, 5]]


def test_headwise_and_elementwise_weights_do_not_fit_each_other() -> None:
    headwise, elementwise = Gate(GateSpec(granularity="headwise"), SHAPE), Gate(GateSpec(), SHAPE)
    assert headwise.state_dict().keys() == elementwise.state_dict().keys()
    for one, another in ((headwise, elementwise), (elementwise, headwise)):
        with pytest.raises(RuntimeError, match="size mismatch"):
            one.load_state_dict(another.state_dict())


@pytest.mark.parametrize(
    ("averaging", "expected"), [("after_activation", 0.625), ("before_activation", 3**0.5 / (1 + 3**0.5))]
)
def test_head_shared_averages_scores_or_logits(averaging: str, expected: float) -> None:
    """Two heads with logits 0 and ln 3: scores 1/2 and 3/4 have the mean 5/8; the mean logit is ln sqrt 3."""
    spec = GateSpec.parse(
        {
            "position": "value",
            "granularity": "headwise",
            "sharing": "head_shared",
            "averaging": averaging,
            "source": "parameter",
            "initialization": "zeros",
        }
    )
    gate = Gate(spec, SHAPE).double()
    gate.logits.data = torch.tensor([[0.0], [3.0]], dtype=torch.float64).clamp(min=1).log()
    scores = gate.scores({"hidden": hidden_states()})
    torch.testing.assert_close(scores, torch.full((1, 1, 1, 1), expected, dtype=torch.float64), rtol=1e-14, atol=0)


def test_shared_scores_serve_all_heads_and_still_differ_between_channels() -> None:
    scores = scores_of(GateSpec(sharing="head_shared"), {"hidden": hidden_states()})
    assert scores.shape == (B, T, 1, 8)
    assert scores.std(-1).min() > 1e-3


# Gates that RMSNorm cancels, and gates that commute with the rotation


BEFORE_NORM = [
    *({"activation": activation, "granularity": "headwise"} for activation in ACTIVATIONS),
    {"granularity": "headwise", "sharing": "head_shared"},
    {"granularity": "headwise", "source": "value", "rank": 3},
    {"granularity": "headwise", "operation": "add"},
    {"granularity": "elementwise"},
]


@pytest.mark.parametrize("position", ["query", "key"])
@pytest.mark.parametrize("axes", BEFORE_NORM, ids=lambda axes: "-".join(map(str, axes.values())))
def test_gate_that_cancels_under_norm_does_nothing(position: str, axes: dict[str, object]) -> None:
    """The gates that are marked change the output in proportion to the norm's epsilon only; the others change it."""
    spec = GateSpec.parse({**axes, "position": position, "placement": "before_norm"})
    change = {}
    for epsilon in (1e-12, 1e-8):
        gated, plain = block_settings((spec,), norm_epsilon=epsilon), block_settings(norm_epsilon=epsilon)
        outputs = [run(one, build_attention(one), hidden_states()) for one in (gated, plain)]
        change[epsilon] = (outputs[0] - outputs[1]).abs().max()
    if spec.cancels_under_norm():
        assert change[1e-12] < 1e-6
        assert change[1e-12] < 1e-3 * change[1e-8]
    else:
        assert change[1e-12] > 1e-2
    moved = block_settings((GateSpec.parse({**axes, "position": position, "placement": "after_norm"}),))
    plain = block_settings()
    after = run(moved, build_attention(moved), hidden_states()) - run(plain, build_attention(plain), hidden_states())
    assert after.abs().max() > 1e-2


def test_gate_that_cancels_under_norm_gates_without_the_norm() -> None:
    spec = GateSpec(position="query", granularity="headwise", placement="before_norm")
    gated, plain = block_settings((spec,), qk_norm=False), block_settings(qk_norm=False)
    change = run(gated, build_attention(gated), hidden_states()) - run(plain, build_attention(plain), hidden_states())
    assert change.abs().max() > 1e-1


@pytest.mark.parametrize("position", ["query", "key"])
def test_headwise_gate_commutes_with_the_rotation(position: str) -> None:
    """A factor that is equal on a head's channels gives the same product before and after RoPE; others don't."""
    for granularity, equal in (("headwise", True), ("elementwise", False)):
        outputs = []
        for placement in ("after_norm", "after_rope"):
            axes = {"position": position, "granularity": granularity, "placement": placement}
            settings = block_settings((GateSpec.parse(axes),))
            outputs.append(run(settings, build_attention(settings), hidden_states()))
        difference = (outputs[0] - outputs[1]).abs().max()
        assert difference < 1e-13 if equal else difference > 1e-2


# The dtype of the scores

BFLOAT16_ROUNDING = 2.0**-8  # largest relative error of one rounding to 8 significant bits


def bfloat16_case(score_dtype: str) -> tuple[Tensor, Tensor]:
    """Relative errors of a bfloat16 product y * sigmoid(z), and the tensor, where z and y are exact in bfloat16."""
    axes = {"source": "parameter", "initialization": "zeros", "score_dtype": score_dtype}
    gate = Gate(GateSpec.parse(axes), AttentionShape(width=40, num_heads=64, num_kv_heads=2, head_size=32))
    generator = torch.Generator().manual_seed(0)
    gate.logits.data = torch.randn(64, 32, generator=generator).bfloat16().float()
    y = torch.randn(B, T, 64, 32, generator=generator).bfloat16()
    gated = gate(y, gate.scores({"hidden": torch.zeros(B, T, 40, dtype=torch.bfloat16)}))
    exact = y.double() * torch.sigmoid(gate.logits.data.double())
    return ((gated.double() - exact) / exact).abs(), gated


def test_float32_scores_round_once_and_bfloat16_scores_twice() -> None:
    once, gated_once = bfloat16_case("float32")
    twice, gated_twice = bfloat16_case("activation")
    assert gated_once.dtype == gated_twice.dtype == torch.bfloat16
    assert once.max() <= 1.001 * BFLOAT16_ROUNDING
    assert 1.5 * BFLOAT16_ROUNDING < twice.max() <= 2.01 * BFLOAT16_ROUNDING
    assert once.mean() < 0.8 * twice.mean()


@pytest.mark.parametrize(("score_dtype", "expected"), [("activation", torch.bfloat16), ("float32", torch.float32)])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "explicit"])
def test_scores_have_their_dtype_and_the_gated_tensor_its_own(
    score_dtype: str, expected: torch.dtype, autocast: bool
) -> None:
    gate = Gate(GateSpec.parse({"score_dtype": score_dtype}), SHAPE)
    hidden = hidden_states().float()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        scores = gate.scores({"hidden": hidden if autocast else hidden.bfloat16()})
        gated = gate(torch.ones(B, T, 6, 8, dtype=torch.bfloat16), scores)
    assert scores.dtype == expected
    assert gated.dtype == torch.bfloat16


@pytest.mark.parametrize("score_dtype", ["activation", "float32"])
@pytest.mark.parametrize("operation", ["multiply", "add"])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "explicit"])
def test_bfloat16_block_is_near_float64(score_dtype: str, operation: str, autocast: bool) -> None:
    """Within 1.5 % of the output's largest value: eight roundings of 0.4 %, which rarely go all one way."""
    settings = block_settings((GateSpec.parse({"score_dtype": score_dtype, "operation": operation}),))
    attention, hidden = build_attention(settings), hidden_states()
    expected = run(settings, attention, hidden)
    narrow = copy.deepcopy(attention).float()
    x = hidden.float() if autocast else hidden.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = run(settings, narrow, x)
    assert output.dtype == torch.bfloat16
    error = (output.double() - expected).abs().max() / expected.abs().max()
    assert BFLOAT16_ROUNDING / 4 < error < 0.015
    output.float().square().sum().backward()
    for name, parameter in narrow.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name


def test_float32_scores_stay_float64_in_a_float64_pass() -> None:
    sources = {"hidden": hidden_states()}
    wide, plain = scores_of(GateSpec(score_dtype="float32"), sources), scores_of(GateSpec(), sources)
    assert wide.dtype == torch.float64
    assert torch.equal(wide, plain)

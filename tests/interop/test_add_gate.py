"""A gate added to a trained decoder changes nothing at first, can learn, and is refused where it would not start so."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from gatelab.gates.gate import Gate
from gatelab.gates.spec import Activation, GateSpec
from gatelab.gates.variants import VARIANTS
from gatelab.interop import add_gate as module
from gatelab.interop.add_gate import GatedStart, add_gate
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.settings import MixtureSettings, ModelSettings

V = 97
EXACT = {"multiply": {"double_sigmoid", "identity"}, "add": {"identity", "silu", "tanh"}}
TO_ROUNDING = {"multiply": {"silu", "softplus"}, "add": set()}
IMPOSSIBLE = {("add", "ns_sigmoid")}


def trained(dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
    """A decoder whose every weight is off its start, as after training."""
    sizes = {
        "vocab_size": V,
        "width": 40,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_size": 8,
        "feedforward_width": 56,
        "max_context": 64,
        "init_std": 0.2,
    }
    decoder = Decoder(ModelSettings.parse({**sizes, **changes}))
    initialize(decoder, seed=3)
    generator = torch.Generator().manual_seed(4)
    for parameter in decoder.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return decoder.to(dtype)


def ids(seed: int = 7) -> Tensor:
    return torch.randint(V, (3, 17), generator=torch.Generator().manual_seed(seed))


def logits(decoder: Decoder) -> Float[Tensor, "B T V"]:
    with torch.no_grad():
        return decoder(ids())


def gates_of(decoder: Decoder) -> list[Gate]:
    return [one for one in decoder.modules() if isinstance(one, Gate)]


def differs_by(start: GatedStart, decoder: Decoder) -> float:
    return float((logits(start.decoder) - logits(decoder)).abs().max())


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.gates])
def test_every_named_gate_starts_as_the_decoder_without(name: str) -> None:
    """All positions, granularities, sources and activations of the table, one gate after the other."""
    decoder = trained()
    before = {key: tensor.clone() for key, tensor in decoder.state_dict().items()}
    start_decoder, is_exact = decoder, True
    for gate in VARIANTS[name].gates:
        start = add_gate(start_decoder, gate)
        start_decoder = start.decoder
        is_exact &= gate.activation in EXACT[gate.operation]
        assert (start.logit_error == 0.0) == (differs_by(start, decoder) == 0.0)
        assert start.score_error < 1e-4
    assert len(gates_of(start_decoder)) == 2 * len(VARIANTS[name].gates)
    if is_exact:
        assert torch.equal(logits(start_decoder), logits(decoder))
    else:
        torch.testing.assert_close(logits(start_decoder), logits(decoder), rtol=0, atol=2e-2)
    assert before.keys() == decoder.state_dict().keys(), "the source is as it was"
    assert all(torch.equal(tensor, before[key]) for key, tensor in decoder.state_dict().items())
    assert all(torch.equal(start_decoder.state_dict()[key], tensor) for key, tensor in before.items())


@pytest.mark.parametrize("operation", ["multiply", "add"])
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("source", ["hidden", "parameter"])
def test_every_activation_is_exact_near_or_refused(operation: str, activation: str, source: str) -> None:
    decoder = trained()
    axes = {"operation": operation, "activation": activation, "source": source, "initialization": "zeros"}
    gate = GateSpec.parse(axes)
    if (operation, activation) in IMPOSSIBLE:
        with pytest.raises(ValueError, match="scores never come near 0; choose another activation, such as silu"):
            add_gate(decoder, gate)
        return
    start = add_gate(decoder, gate)
    neutral = 1.0 if operation == "multiply" else 0.0
    assert start.score_error == abs(start.score - neutral)
    scores = gates_of(start.decoder)[0].scores({"hidden": torch.randn(3, 17, 40)})
    torch.testing.assert_close(scores, torch.full_like(scores, start.score), rtol=0, atol=2e-7)
    if activation in EXACT[operation]:
        assert start.logit_error == 0.0 == start.score_error and torch.equal(logits(start.decoder), logits(decoder))
    elif activation in TO_ROUNDING[operation]:
        assert start.score_error < 1e-15 and start.logit_error < 1e-5
    else:
        assert 0 < start.score_error < 1e-4 and 0 < start.logit_error < module.LARGEST_ERROR


@pytest.mark.parametrize("name", ["mixture", "sandwich", "untied", "half", "no norm", "low rank", "foreign"])
def test_whatever_the_decoder_is(name: str) -> None:
    decoder = {
        "mixture": lambda: trained(mixture=MixtureSettings(num_experts=5, experts_per_token=2, expert_width=20)),
        "sandwich": lambda: trained(sandwich_norm=True),
        "untied": lambda: trained(tied_head=False),
        "half": lambda: trained(torch.bfloat16),
        "no norm": lambda: trained(qk_norm=False),
        "low rank": trained,
        "foreign": lambda: trained(
            centred_norms=True,
            biased_projections=("q", "k", "v"),
            embedding_scale=6.0,
            layers=({"num_heads": 4, "window": 5}, {"rotary": False, "mixture": False}),
            mixture=MixtureSettings(
                num_experts=5, experts_per_token=2, expert_width=20, router="sigmoid", selection_bias=True
            ),
        ),
    }[name]()
    axes = {"activation": "double_sigmoid", "rank": 3 if name == "low rank" else None}
    start = add_gate(decoder, GateSpec.parse(axes))
    assert torch.equal(logits(start.decoder), logits(decoder)) and start.logit_error == 0.0
    assert {p.dtype for p in start.decoder.parameters()} == {next(decoder.parameters()).dtype}


def test_the_first_matrix_of_a_rank_is_that_of_a_fresh_model() -> None:
    gate = GateSpec(activation="double_sigmoid", initialization="zeros", rank=3)
    start = add_gate(trained(), gate, seed=11)
    fresh = Decoder(start.decoder.settings)
    initialize(fresh, seed=11)
    for added, expected in zip(gates_of(start.decoder), gates_of(fresh), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(added.parameters(), expected.parameters(), strict=True))
        assert float(next(p for n, p in added.named_parameters() if "down" in n).detach().std()) > 0.1


def test_some_layers_only() -> None:
    start = add_gate(trained(), GateSpec(activation="double_sigmoid", layers=(1,)))
    assert len(gates_of(start.decoder)) == 1 and start.logit_error == 0.0


def test_precision_of_activations_and_mode_are_kept() -> None:
    decoder = trained().eval()
    decoder.activation_dtype = torch.bfloat16
    start = add_gate(decoder, GateSpec(activation="double_sigmoid"))
    assert start.decoder.activation_dtype == torch.bfloat16 and not start.decoder.training
    assert start.logit_error == 0.0 and logits(start.decoder).dtype == torch.bfloat16


def test_the_error_of_a_near_start_is_in_proportion_to_that_of_its_scores() -> None:
    """In float64, where nothing else is seen: e^-b at the score, and as much more or less at the logits."""
    decoder = trained(torch.float64)
    starts = [add_gate(decoder, GateSpec(bias=bias)) for bias in (7.0, 9.0, 14.0)]
    for start, bias in zip(starts, (7.0, 9.0, 14.0), strict=True):
        assert start.score_error == pytest.approx(1 / (1 + math.exp(bias)), rel=1e-6)
        assert start.gate.bias == bias and start.gate.initialization == "zeros"
    ratios = [start.logit_error / start.score_error for start in starts]
    assert ratios == pytest.approx([ratios[-1]] * 3, rel=0.05) and 0.1 < ratios[-1] < 10


@pytest.mark.parametrize("activation", ["sigmoid", "ns_sigmoid", "tanh", "double_sigmoid"])
def test_a_gate_can_learn_in_bfloat16(activation: Activation) -> None:
    """A bfloat16 sigmoid of 10 is 1, and its gradient nothing: scores near their limit need float32."""
    decoder = trained()
    decoder.activation_dtype = torch.bfloat16
    start = add_gate(decoder, GateSpec(activation=activation))
    start.decoder(ids()).float().square().mean().backward()
    for gate in gates_of(start.decoder):
        assert all(p.grad is not None and bool(p.grad.any()) for p in gate.parameters())


def test_the_control_for_that_test_has_no_gradient() -> None:
    decoder = trained()
    start = add_gate(decoder, GateSpec(bias=10.0))
    settings = start.decoder.settings.with_overrides(["gates.0.score_dtype=activation"])
    dead = Decoder(settings)
    dead.load_state_dict(start.decoder.state_dict())
    dead.activation_dtype = torch.bfloat16
    dead(ids()).float().square().mean().backward()
    assert not any(bool(p.grad.any()) for gate in gates_of(dead) for p in gate.parameters() if p.grad is not None)


def test_training_the_copy_leaves_the_source() -> None:
    decoder = trained()
    start = add_gate(decoder, GateSpec(activation="double_sigmoid"))
    before = logits(decoder)
    with torch.no_grad():
        for parameter in start.decoder.parameters():
            parameter.add_(0.3)
    assert torch.equal(logits(decoder), before) and not torch.equal(logits(start.decoder), before)


@pytest.mark.parametrize("name", ["sdpa_elementwise", "value_headwise", "key_after_rope", "dense_output_additive_silu"])
def test_the_gate_is_there_from_the_start(name: str) -> None:
    """Moving the gate's weights alone moves the logits."""
    decoder = trained()
    start = add_gate(decoder, VARIANTS[name].gates[0])
    for gate in gates_of(start.decoder):
        gate.get_parameter("projection.weight").data += 0.5
    assert differs_by(start, decoder) > 0.1


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            {"activation": "double_sigmoid", "bias": 3.0},
            "bias=3 starts a double_sigmoid gate at scores of 1.905, not",
        ),
        ({"operation": "add", "activation": "tanh", "bias": 0.5}, "scores of 0.4621, not 0; leave the bias out"),
        ({"bias": 3.0}, r"sigmoid gate with start bias 3 moves logits by .* more than 0.01; write a larger bias, or"),
        (
            {"bias": 20.0},
            "bias=20 starts a sigmoid gate at 1 in float32, without a gradient; leave the bias out",
        ),
        ({"bias": -10.0}, "or activation=double_sigmoid, which starts exactly"),
        (
            {"operation": "add", "bias": -3.0},
            "write a bias further below zero, or activation=silu, which starts exactly",
        ),
        ({"layers": (5,)}, "a sdpa_output gate is on layer 5, but the last layer is 1"),
        ({"source": "prefix", "prefix_channels": 41}, "a gate reads prefix_channels=41 of width=40 channels"),
    ],
)
def test_refusals(axes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        add_gate(trained(), GateSpec.parse(axes))


def test_a_second_gate_at_a_position_is_refused_and_one_elsewhere_is_not() -> None:
    decoder = trained(gates=[{"position": "value"}])
    assert add_gate(decoder, GateSpec(activation="double_sigmoid")).logit_error == 0.0
    with pytest.raises(ValueError, match="layer 0 has 2 gates at position value; one is possible"):
        add_gate(decoder, GateSpec(position="value", activation="double_sigmoid"))


def test_exact_bias_that_is_written_out_is_taken() -> None:
    start = add_gate(trained(), GateSpec(activation="double_sigmoid", bias=0.0))
    assert start.gate.bias == 0.0 and start.logit_error == 0.0
    assert gates_of(start.decoder)[0].get_parameter("projection.bias").shape == (48,)

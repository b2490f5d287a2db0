"""Clamped gates against decoders without gates, against their own scores, and against a mean taken by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, tiny_decoder, tiny_settings
from torch import Tensor

from gatelab.evaluate.clamp import calibrate, probe_clamping, replaced_scores
from gatelab.evaluate.rows import Subject
from gatelab.gates.gate import Gate
from gatelab.gates.spec import GateSpec
from gatelab.model.decoder import Decoder

SUBJECT = Subject("tiny", step=7)
GATES = ["sdpa_elementwise", "sdpa_headwise", "value_elementwise", "sdpa_head_shared", "sdpa_additive_silu"]


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (3, 23), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def calibration() -> Tensor:
    return torch.randint(VOCABULARY, (2, 31), generator=torch.Generator().manual_seed(2))


def without_gates(decoder: Decoder) -> Decoder:
    plain = Decoder(decoder.settings.model_copy(update={"gates": ()}))
    weights = {name: tensor for name, tensor in decoder.state_dict().items() if ".gates." not in name}
    plain.load_state_dict(weights)
    return plain.to(next(decoder.parameters()).dtype).eval()


@torch.no_grad()
def perplexity_of(decoder: Decoder, tokens: Tensor) -> float:
    """exp of the mean of -ln p(next token), one token after another."""
    log_probabilities = decoder(tokens).log_softmax(-1)
    nats = [
        -float(log_probabilities[row, place, tokens[row, place + 1]])
        for row in range(tokens.shape[0])
        for place in range(tokens.shape[1] - 1)
    ]
    return math.exp(sum(nats) / len(nats))


def perplexities(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {row["metric"].removeprefix("clamped_perplexity[").removesuffix("]"): row["value"] for row in rows}


@pytest.mark.parametrize("gate", GATES)
def test_neutral_scores_are_a_decoder_without_gates(gate: str, tokens: Tensor, calibration: Tensor) -> None:
    decoder = tiny_decoder(gate, torch.float64)
    found = perplexities(probe_clamping(decoder, tokens, calibration, SUBJECT))
    assert found["as_trained"] == pytest.approx(perplexity_of(decoder, tokens), rel=1e-12)
    assert found["neutral"] == pytest.approx(perplexity_of(without_gates(decoder), tokens), rel=1e-12)
    assert abs(found["neutral"] / found["as_trained"] - 1) > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("gate", GATES)
def test_the_exact_scores_of_each_token_change_nothing(gate: str, tokens: Tensor) -> None:
    decoder, seen = tiny_decoder(gate), {}

    def note(name: str, scores: Tensor) -> Tensor:
        seen[name] = scores.clone()
        return scores

    with replaced_scores(decoder, note):
        expected = decoder(tokens)
    assert len(seen) == 3
    with replaced_scores(decoder, lambda name, scores: seen[name]):
        assert torch.equal(decoder(tokens), expected)
    with replaced_scores(decoder, lambda name, scores: seen[name].flip(1)):
        assert not torch.allclose(decoder(tokens), expected)
    assert torch.equal(decoder(tokens), expected)


@torch.no_grad()
@pytest.mark.parametrize("gate", GATES)
def test_means_are_those_of_all_calibration_tokens(gate: str, calibration: Tensor) -> None:
    decoder, seen = tiny_decoder(gate, torch.float64), {}
    gates = {name: module for name, module in decoder.named_modules() if isinstance(module, Gate)}
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs, name=name: seen.update({name: inputs[1]}))
        for name, module in gates.items()
    ]
    decoder(calibration)
    for hook in hooks:
        hook.remove()
    found = calibrate(decoder, calibration)
    assert found.keys() == gates.keys() and len(found) == 3
    for name, scores in seen.items():
        torch.testing.assert_close(found[name], scores.mean((0, 1)), rtol=1e-12, atol=0)


@torch.no_grad()
def test_each_arm_holds_its_mean(tokens: Tensor, calibration: Tensor) -> None:
    """The same decoder, its gates replaced by constants: input-independent gates of other means."""
    decoder = tiny_decoder(dtype=torch.float64)
    means = calibrate(decoder, calibration)
    found = perplexities(probe_clamping(decoder, tokens, calibration, SUBJECT))
    held = {
        "channel_mean": means,
        "head_mean": {name: mean.mean(1, keepdim=True).expand(6, 10) for name, mean in means.items()},
        "layer_mean": {name: mean.mean().expand(6, 10) for name, mean in means.items()},
    }
    for how, scores in held.items():
        spec = GateSpec(position="sdpa_output", source="parameter", initialization="zeros", activation="identity")
        constant = Decoder(tiny_settings().model_copy(update={"gates": (spec,)})).double()
        weights = {name: tensor for name, tensor in decoder.state_dict().items() if ".gates." not in name}
        constant.load_state_dict(weights | {f"{name}.logits": score for name, score in scores.items()})
        assert found[how] == pytest.approx(perplexity_of(constant, tokens), rel=1e-12)
    assert len(set(found.values())) == 5


def test_a_constant_gate_does_not_mind_being_held(tokens: Tensor, calibration: Tensor) -> None:
    spec = GateSpec(position="sdpa_output", source="parameter", initialization="zeros")
    decoder = tiny_decoder(dtype=torch.float64, gates=(spec,))
    found = perplexities(probe_clamping(decoder, tokens, calibration, SUBJECT))
    assert found["channel_mean"] == pytest.approx(found["as_trained"], rel=1e-12)
    assert abs(found["layer_mean"] / found["as_trained"] - 1) > 1e-6


def test_two_gates_are_held_together(tokens: Tensor, calibration: Tensor) -> None:
    specs = (GateSpec(position="sdpa_output"), GateSpec(position="value", granularity="headwise"))
    decoder = tiny_decoder(dtype=torch.float64, gates=specs)
    found = perplexities(probe_clamping(decoder, tokens, calibration, SUBJECT))
    assert found["neutral"] == pytest.approx(perplexity_of(without_gates(decoder), tokens), rel=1e-12)


def test_rows_are_tidy(tokens: Tensor, calibration: Tensor) -> None:
    rows = probe_clamping(tiny_decoder(), tokens, calibration, SUBJECT)
    assert list(perplexities(rows)) == ["as_trained", "layer_mean", "head_mean", "channel_mean", "neutral"]
    columns = ["model", "step", "layer", "head", "channel", "query_range", "metric", "value", "floor", "n"]
    assert all(list(row) == columns for row in rows)
    assert {(row["model"], row["step"], row["layer"], row["n"]) for row in rows} == {("tiny", 7, None, 3 * 22)}


def test_bfloat16_decoders_are_clamped_in_their_dtype(tokens: Tensor, calibration: Tensor) -> None:
    found = perplexities(probe_clamping(tiny_decoder(dtype=torch.bfloat16), tokens, calibration, SUBJECT))
    exact = perplexities(probe_clamping(tiny_decoder(), tokens, calibration, SUBJECT))
    assert found == pytest.approx(exact, rel=0.1)


def test_calibration_on_the_measured_text_is_refused(tokens: Tensor) -> None:
    with pytest.raises(
        ValueError, match="a window to calibrate on is also measured; gates must be calibrated on other"
    ):
        probe_clamping(tiny_decoder(), tokens, tokens[1:2], SUBJECT)


def test_a_model_without_gates_is_refused(tokens: Tensor, calibration: Tensor) -> None:
    with pytest.raises(ValueError, match="tiny has no gates of GateLab's, so there is nothing to clamp"):
        probe_clamping(tiny_decoder("none"), tokens, calibration, SUBJECT)

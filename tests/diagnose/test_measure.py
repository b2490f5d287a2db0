"""One measured pass: right against full maps, for every kind of gate, and without a trace in the model."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attention_maps import causal, naive_map
from torch import Tensor, nn

from gatelab.diagnose.attention import uniform_floor
from gatelab.diagnose.measure import Measurement, attach_decoder, measure
from gatelab.diagnose.recorder import Recorder
from gatelab.gates.variants import find_variant
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.settings import MixtureSettings, ModelSettings

B, T, L, H, C = 2, 13, 3, 6, 10
MIXTURE = MixtureSettings(num_experts=5, experts_per_token=2, expert_width=20)


def make_decoder(gate: str = "sdpa_elementwise", dtype: torch.dtype = torch.float64, **changes: Any) -> Decoder:
    variant = find_variant(gate)
    sizes = {
        "vocab_size": 29,
        "width": 24,
        "num_layers": L,
        "num_heads": H,
        "num_kv_heads": 2,
        "head_size": C,
        "feedforward_width": 36,
        "max_context": 21,
        "init_std": 0.25,
        "gates": variant.gates,
        "control": variant.control,
    }
    decoder = Decoder(ModelSettings(**{**sizes, **changes})).to(dtype)
    initialize(decoder, seed=2)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    return decoder


def make_tokens() -> Tensor:
    return torch.randint(29, (B, T), generator=torch.Generator().manual_seed(4))


class Keeping:
    """Keeps all that attention layers hand over, as it is."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}

    def record(self, layer: int, tensors: Mapping[str, Tensor], scores: Mapping[str, Tensor]) -> None:
        self.layers[layer] = (dict(tensors), dict(scores))


def eager_pass(decoder: Decoder, tokens: Tensor) -> tuple[Keeping, list[Tensor]]:
    """Attention tensors and layer outputs of a plain pass."""
    kept, hidden = Keeping(), []
    handles = [
        layer.register_forward_hook(lambda m, i, output: hidden.append(output[0])) for layer in decoder.model.layers
    ]
    for layer in decoder.model.layers:
        layer.self_attn.recorder = kept
    with torch.no_grad():
        decoder(tokens)
    for handle, layer in zip(handles, decoder.model.layers, strict=True):
        handle.remove()
        layer.self_attn.recorder = None
    return kept, hidden


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 5e-6), (torch.bfloat16, 1e-4)])
def test_a_gated_decoder_against_its_full_maps(dtype: torch.dtype, tolerance: float, is_causal: bool) -> None:
    decoder, tokens = make_decoder("sdpa_and_value", dtype, causal=is_causal), make_tokens()
    kept, hidden = eager_pass(decoder, tokens)
    visible = causal(T, T) if is_causal else torch.ones(T, T, dtype=torch.bool)
    found = measure(decoder, tokens, causal=is_causal)
    assert len(found.layers) == L == len(kept.layers)
    worst, means, gate_means, largest = 0.0, [], [], []
    for number, layer in enumerate(found.layers):
        tensors, scores = kept.layers[number]
        first = naive_map(tensors["query"], tensors["key"], C**-0.5, visible)[..., 0]
        share = first.mean(-1)
        assert layer.first_token == pytest.approx(share.mean(0).tolist(), abs=tolerance)
        assert layer.first_token_after_first == pytest.approx(first[..., 1:].mean((0, 2)).tolist(), abs=tolerance)
        assert layer.sink_rate == (share > 0.3).double().mean(0).tolist()
        assert layer.output_magnitude == pytest.approx(tensors["output"].double().abs().mean().item(), rel=1e-5)
        gated = tensors["gated_output"].double().abs().mean().item()
        assert layer.gated_output_magnitude == pytest.approx(gated, rel=1e-5) and gated < layer.output_magnitude
        assert layer.gates.keys() == {"sdpa_output", "value"}
        for position, values in scores.items():
            assert layer.gates[position].mean == pytest.approx(values.double().mean().item(), abs=tolerance)
            gate_means.append(values.double().mean().item())
        magnitudes = hidden[number].double().abs()
        assert layer.hidden is not None and layer.hidden.value == pytest.approx(magnitudes.max().item(), rel=1e-6)
        assert magnitudes[:, layer.hidden.token, layer.hidden.channel].max() == magnitudes.max()
        worst, means = max(worst, share.mean().item()), [*means, share.mean().item()]
        largest.append(magnitudes.max().item())
    assert found.first_token == pytest.approx(sum(means) / L, abs=tolerance)
    assert found.worst_layer_first_token == pytest.approx(worst, abs=tolerance)
    assert found.gate_mean == pytest.approx(sum(gate_means) / len(gate_means), abs=tolerance)
    assert found.largest_activation == pytest.approx(max(largest), rel=1e-6)
    assert found.mean_activation_maximum == pytest.approx(sum(largest) / L, rel=1e-6)
    assert max(means) - min(means) > 1e-3, "layers differ"


GATED = [
    "sdpa_elementwise",
    "sdpa_headwise",
    "sdpa_head_shared",
    "value_headwise",
    "key_head_shared",
    "query_after_rope",
    "dense_output_elementwise",
    "sdpa_input_independent",
    "sdpa_headwise_input_independent",
    "value_input_independent",
    "sdpa_additive_silu",
    "sdpa_additive_identity",
    "sdpa_from_output",
    "sdpa_headwise_from_value",
    "sdpa_low_rank",
    "sdpa_and_value_headwise",
]


@pytest.mark.parametrize("gate", GATED)
def test_every_kind_of_gate_is_measured(gate: str) -> None:
    decoder, tokens = make_decoder(gate), make_tokens()
    kept, _ = eager_pass(decoder, tokens)
    found = measure(decoder, tokens)
    specs = {spec.position: spec for spec in find_variant(gate).gates}
    for number, layer in enumerate(found.layers):
        assert layer.gates.keys() == specs.keys()
        for position, spec in specs.items():
            scores = kept.layers[number][1][position].double()
            statistics = layer.gates[position]
            heads, channels = spec.gated_shape(decoder.settings.attention_shape)
            heads = 1 if spec.sharing == "head_shared" else heads
            channels = channels if spec.granularity == "elementwise" else 1
            samples = 1 if spec.source == "parameter" else B * T
            assert sum(statistics.histogram) == samples * heads * channels == scores.numel()
            assert len(statistics.mean_by_head) == heads
            assert statistics.mean == pytest.approx(scores.mean().item(), abs=1e-6)
    assert found.summary()["gate_mean"] is not None


def test_gates_on_some_layers_are_those_measured() -> None:
    gate = find_variant("sdpa_headwise").gates[0].model_copy(update={"layers": (1,)})
    found = measure(make_decoder(gates=(gate,)), make_tokens())
    assert [list(layer.gates) for layer in found.layers] == [[], ["sdpa_output"], []]
    assert found.gate_mean == found.layers[1].gates["sdpa_output"].mean


@pytest.mark.parametrize("gate", ["none", "rms_norm_on_sdpa"])
def test_without_a_gate_there_is_no_gate_mean(gate: str) -> None:
    assert measure(make_decoder(gate), make_tokens()).summary()["gate_mean"] is None


def test_figures_carry_their_context_as_plain_json() -> None:
    found = measure(make_decoder(mixture=MIXTURE), make_tokens())
    mapping = json.loads(json.dumps(found.to_mapping(), allow_nan=False))
    assert mapping["context"] == {"num_sequences": B, "tokens_per_sequence": T}
    assert mapping["floor"] == uniform_floor(T) and mapping["floor_after_first"] == uniform_floor(T, skipped=1)
    assert mapping["summary"] == found.summary() and found.summary()["measured_tokens"] == B * T
    assert all(math.isfinite(value) for value in found.summary().values() if value is not None)
    assert len(mapping["layers"]) == L and mapping["layers"][0]["hidden"].keys() == {
        "value",
        "token",
        "channel",
        "median",
    }


def traces(model: nn.Module) -> dict[str, Any]:
    """All of a model that a measurement could have changed."""
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "modes": [module.training for module in model.modules()],
        "hooks": [
            (len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks))
            for module in model.modules()
        ],
        "recorders": [getattr(module, "recorder", None) for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "gradients": [parameter.grad is None for parameter in model.parameters()],
        "needs": [parameter.requires_grad for parameter in model.parameters()],
    }


def assert_same_traces(found: dict[str, Any], expected: dict[str, Any]) -> None:
    weights, wanted = found.pop("weights"), expected.pop("weights")
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert found == expected


@pytest.fixture
def mixed() -> Decoder:
    """A decoder in train mode, but for one layer."""
    decoder = make_decoder().train()
    decoder.model.layers[1].eval()
    return decoder


def test_measuring_changes_nothing(mixed: Decoder) -> None:
    before, tokens = traces(mixed), make_tokens()
    logits = mixed(tokens)
    first, again = measure(mixed, tokens), measure(mixed, tokens)
    assert first == again
    assert_same_traces(traces(mixed), before)
    assert torch.equal(mixed(tokens), logits) and torch.is_grad_enabled()
    torch.random.manual_seed(0)
    state = torch.random.get_rng_state()
    measure(mixed, tokens)
    assert torch.equal(torch.random.get_rng_state(), state)


def fail_in_forward(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder.model.layers[2].mlp, "forward", lambda x: 1 / 0)


def fail_in_recorder(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "record_hidden", lambda *arguments: 1 / 0)


@pytest.mark.parametrize("fail", [fail_in_forward, fail_in_recorder])
def test_nor_after_an_exception(
    mixed: Decoder, monkeypatch: pytest.MonkeyPatch, fail: Callable[[Decoder, pytest.MonkeyPatch], None]
) -> None:
    expected = measure(mixed, make_tokens())
    with monkeypatch.context() as patch:
        fail(mixed, patch)
        before = traces(mixed)
        with pytest.raises(ZeroDivisionError):
            measure(mixed, make_tokens())
        assert_same_traces(traces(mixed), before)
    assert measure(mixed, make_tokens()) == expected


def test_a_recorder_that_was_there_stays(mixed: Decoder) -> None:
    mine = Keeping()
    mixed.model.layers[0].self_attn.recorder = mine
    measure(mixed, make_tokens())
    assert mixed.model.layers[0].self_attn.recorder is mine and not mine.layers


def test_a_foreign_model_is_connected_from_outside() -> None:
    """The caller says how the recorder gets at its layers; here under another class and without attributes of ours."""

    class Foreign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_decoder("none")

        def forward(self, tokens: Tensor) -> Tensor:
            return self.inner(tokens)

    states = []

    @contextmanager
    def attach(model: nn.Module, recorder: Recorder) -> Iterator[None]:
        states.append("attached")
        with attach_decoder(model, recorder):
            yield
        states.append("let go")

    found = measure(Foreign(), make_tokens(), attach)
    assert states == ["attached", "let go"] and found == measure(make_decoder("none"), make_tokens())


def test_a_model_that_can_not_be_observed_is_refused() -> None:
    with pytest.raises(ValueError, match="no attention layer of Embedding could be observed; pass attach="):
        measure(nn.Embedding(29, 3), make_tokens())


def test_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="sequences of 1 token say nothing about attention; measure at least 2"):
        measure(make_decoder(), make_tokens()[:, :1])


def test_a_measurement_is_a_record_of_values() -> None:
    found: Measurement = measure(make_decoder(), make_tokens())
    assert copy.deepcopy(found) == found

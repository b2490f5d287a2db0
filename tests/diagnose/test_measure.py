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

from gatelab.diagnose.calls import Visibility
from gatelab.diagnose.measure import Forward, Measurement, attach_decoder, measure
from gatelab.diagnose.measurement import COLUMNS
from gatelab.diagnose.recorder import Recorder
from gatelab.diagnose.sinks import uniform_floor
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
    found = measure(decoder, tokens)
    assert len(found.layers) == L == len(kept.layers)
    worst, means, gate_means, largest = 0.0, [], [], []
    for number, layer in enumerate(found.layers):
        tensors, scores = kept.layers[number]
        first = naive_map(tensors["query"], tensors["key"], C**-0.5, visible)[..., 0]
        share = first.mean(-1)
        assert layer.by_head("first_token_attention") == pytest.approx(share.mean(0).tolist(), abs=tolerance)
        after_first = first[..., 1:].mean((0, 2)).tolist()
        assert layer.by_head("first_token_attention", "from_1") == pytest.approx(after_first, abs=tolerance)
        assert layer.by_head("sink_rate") == (share > 0.3).double().mean(0).tolist()
        for metric, tensor in (("output_magnitude", "output"), ("gated_output_magnitude", "gated_output")):
            expected = tensors[tensor].double().abs().mean((0, 1, 3)).tolist()
            assert layer.by_head(metric) == pytest.approx(expected, rel=1e-5)
        assert layer.gates.keys() == {"sdpa_output", "value"}
        for position, values in scores.items():
            assert layer.gates[position].whole.mean == pytest.approx(values.double().mean().item(), abs=tolerance)
            gate_means.append(values.double().mean().item())
        magnitudes = hidden[number].double().abs()
        assert layer.hidden is not None and layer.hidden.value == pytest.approx(magnitudes.max().item(), rel=1e-6)
        place = layer.hidden.largest[0]
        assert magnitudes[:, place.token, place.channel].max() == magnitudes.max()
        worst, means = max(worst, share.mean().item()), [*means, share.mean().item()]
        largest.append(magnitudes.max().item())
    summary = found.summary()
    assert summary["first_token_attention"] == pytest.approx(sum(means) / L, abs=tolerance)
    assert summary["first_token_attention_worst_layer"] == pytest.approx(worst, abs=tolerance)
    assert summary["first_token_attention_floor"] == pytest.approx(uniform_floor(Visibility(T, T, is_causal)))
    assert summary["gate_mean"] == pytest.approx(sum(gate_means) / len(gate_means), abs=tolerance)
    assert summary["largest_activation"] == pytest.approx(max(largest), rel=1e-6)
    assert summary["mean_activation_maximum"] == pytest.approx(sum(largest) / L, rel=1e-6)
    assert found.embedding is not None and found.embedding.hidden is not None
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
            assert sum(statistics.whole.histogram) == samples * heads * channels == scores.numel()
            assert len(statistics.by_head) == heads and statistics.tokens == B * T
            assert statistics.whole.mean == pytest.approx(scores.mean().item(), abs=1e-6)
    assert found.summary()["gate_mean"] is not None


def test_gates_on_some_layers_are_those_measured() -> None:
    gate = find_variant("sdpa_headwise").gates[0].model_copy(update={"layers": (1,)})
    found = measure(make_decoder(gates=(gate,)), make_tokens())
    assert [list(layer.gates) for layer in found.layers] == [[], ["sdpa_output"], []]
    assert found.gate_mean == found.layers[1].gates["sdpa_output"].whole.mean


@pytest.mark.parametrize("gate", ["none", "rms_norm_on_sdpa"])
def test_without_a_gate_there_is_no_gate_mean(gate: str) -> None:
    assert measure(make_decoder(gate), make_tokens()).summary()["gate_mean"] is None


def test_figures_carry_their_context_as_plain_json() -> None:
    found = measure(make_decoder(mixture=MIXTURE), make_tokens())
    mapping = json.loads(json.dumps(found.to_mapping(), allow_nan=False))
    assert mapping["schema_version"] == 1 and mapping["context"] == {
        "num_sequences": B,
        "tokens_per_sequence": T,
        "tokens": B * T,
        "padding": 0,
        "documents": False,
        "batch_size": 1,
        "full": False,
        "dtype": "float64",
        "torch": torch.__version__,
    }
    assert mapping["floor"] == pytest.approx(uniform_floor(Visibility(T, T)))
    assert mapping["summary"] == found.summary() and found.summary()["measured_tokens"] == B * T
    assert all(math.isfinite(value) for value in found.summary().values() if value is not None)
    assert len(mapping["layers"]) == L and mapping["layers"][0]["hidden"].keys() >= {"value", "token", "median"}


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
        "kernels": [getattr(module, "kernel", None) for module in model.modules()],
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
    def attach(model: nn.Module, recorder: Recorder) -> Iterator[Forward]:
        states.append("attached")
        with attach_decoder(model, recorder) as forward:
            yield forward
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


PADDED = torch.tensor([[1] * T, [0] * 4 + [1] * (T - 4)])
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 8, [0] * 2 + [1] * 7 + [2] * 4])


def metrics_of(found: Measurement) -> dict[tuple[Any, ...], Any]:
    """Every row's figures under its place; positions of keys and tokens apart."""
    return {
        (row["layer"], row["head"], row["query_range"], row["metric"]): (row["value"], row["floor"])
        for row in found.rows("model")
        if not row["metric"].endswith(("_token", "top_key"))
    }


@pytest.mark.parametrize("gate", ["sdpa_elementwise", "value_headwise", "sdpa_additive_silu", "none"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_padded_row_is_measured_as_alone(gate: str, batch_size: int) -> None:
    """Left padding moves neither the figures of the other row nor its own, but those of the absolute key 0."""
    decoder, tokens = make_decoder(gate), make_tokens()
    both = measure(decoder, tokens, full=True, batch_size=batch_size, padding_mask=PADDED.bool())
    alone = [measure(decoder, tokens[:1], full=True), measure(decoder, tokens[1:, 4:], full=True)]
    numbers = [T, T - 4]
    for number, layer in enumerate(both.layers):
        solo = [one.layers[number] for one in alone]
        for metric in ("first_real_key_attention", "first_4_attention", "attention_entropy", "output_magnitude"):
            expected = sum(n * torch.tensor(one.by_head(metric)) for n, one in zip(numbers, solo, strict=True))
            found = torch.tensor(both.layers[number].by_head(metric))
            torch.testing.assert_close(found, expected / sum(numbers), rtol=1e-5, atol=1e-6)
        assert layer.by_head("first_token_attention") == pytest.approx(solo[0].by_head("first_token_attention"))
        assert layer.hidden is not None and layer.hidden.tokens == sum(numbers)
        assert layer.hidden.value == pytest.approx(max(one.hidden.value for one in solo if one.hidden))
        for position, statistics in layer.gates.items():
            means = [one.gates[position].whole.mean for one in solo]
            expected_mean = sum(n * mean for n, mean in zip(numbers, means, strict=True)) / sum(numbers)
            assert statistics.whole.mean == pytest.approx(expected_mean)
    assert both.context["padding"] == 4 and both.summary()["measured_tokens"] == 2 * T - 4


def test_packed_documents_are_measured_as_alone() -> None:
    decoder, tokens = make_decoder(), make_tokens()
    packed = measure(decoder, tokens, full=True, documents=DOCUMENTS)
    pieces = [tokens[row : row + 1][:, DOCUMENTS[row] == number] for row in range(B) for number in range(3)]
    pieces = [piece for piece in pieces if piece.numel()]
    alone = [measure(decoder, piece, full=True) for piece in pieces]
    sizes = [piece.shape[1] for piece in pieces]
    for number, layer in enumerate(packed.layers):
        for metric in ("first_real_key_attention", "attention_entropy", "attention_distance"):
            solo = [torch.tensor(one.layers[number].by_head(metric)) for one in alone]
            expected = sum(n * one for n, one in zip(sizes, solo, strict=True)) / sum(sizes)
            torch.testing.assert_close(torch.tensor(layer.by_head(metric)), expected, rtol=1e-5, atol=1e-6)
        first = (DOCUMENTS[:, :1] == DOCUMENTS).sum().item()
        figures = {(one.metric, one.query_range): one for one in layer.figures}
        assert figures["first_token_attention", "all"].n == first < sum(sizes)
    assert packed.context["documents"] is True


@pytest.mark.parametrize("is_full", [True, False])
def test_batches_give_what_one_pass_gives(is_full: bool) -> None:
    decoder, tokens = make_decoder("sdpa_and_value"), make_tokens()
    options: dict[str, Any] = {"full": is_full, "delimiters": {"some": [3, 7, 11]}}
    one, two = (metrics_of(measure(decoder, tokens, batch_size=size, **options)) for size in (1, 2))
    assert one.keys() == two.keys()
    for place, figures in one.items():
        for figure, expected in zip(figures, two[place], strict=True):
            assert figure is expected is None or figure == pytest.approx(expected, rel=1e-6, abs=1e-9), place


def test_rows_have_all_columns_and_json_all_figures() -> None:
    found = measure(make_decoder("sdpa_and_value"), make_tokens(), full=True, delimiters={"some": [3, 7, 11]})
    rows = found.rows("a model", step=7)
    assert all(tuple(row) == COLUMNS and row["model"] == "a model" and row["step"] == 7 for row in rows)
    places = [(row["layer"], row["head"], row["query_range"], row["metric"]) for row in rows]
    assert len(set(places)) == len(places) and {row["layer"] for row in rows} == {-1, 0, 1, 2}
    assert {row["metric"] for row in rows} == {
        "first_token_attention", "first_4_attention", "first_real_key_attention", "sink_rate", "top_key",
        "top_key_attention", "delimiter_attention[some]", "effective_sink", "attention_entropy", "attention_distance",
        "largest_logit", "output_magnitude", "gated_output_magnitude", "vo_effective_rank", "vo_stable_rank",
        "output_effective_rank", "output_stable_rank", "gated_output_effective_rank", "gated_output_stable_rank",
        "largest_activation", "largest_activation_token", "second_activation", "second_activation_token",
        "third_activation", "third_activation_token", "median_activation", "activation_ratio", "share_above_100",
        "share_above_1000_medians", "activation_kurtosis", "residual_norm",
        *(f"{metric}[{position}]" for position in ("sdpa_output", "value") for metric in (
            "gate_mean", "gate_below_0.01", "gate_below_0.1", "gate_above_0.9", "gate_sink_correlation",
            "gate_binary_entropy", "gate_histogram_entropy", "gate_attention_entropy_correlation")),
    }  # fmt: skip
    assert all(math.isfinite(row["value"]) and row["n"] > 0 for row in rows)
    json.dumps(found.to_mapping(), allow_nan=False)


def test_kernels_of_a_measured_pass_are_those_of_a_plain_one() -> None:
    decoder, tokens = make_decoder(dtype=torch.float32), make_tokens()
    kept, hidden = eager_pass(decoder, tokens)
    del kept
    found = measure(decoder, tokens, batch_size=B)
    for layer, state in zip(found.layers, hidden, strict=True):
        assert layer.hidden is not None and layer.hidden.value == state.abs().max().item()


def test_padding_that_the_recorder_was_not_told_of_is_refused() -> None:
    decoder, recorder = make_decoder(), Recorder()
    message = "this pass has other padding or documents than Recorder.start was told of"
    with attach_decoder(decoder, recorder), pytest.raises(ValueError, match=message):
        decoder(make_tokens(), documents=DOCUMENTS)


def test_nothing_but_padding_is_refused() -> None:
    with pytest.raises(ValueError, match="the padding mask leaves no token to measure"):
        measure(make_decoder(), make_tokens(), padding_mask=torch.zeros(B, T, dtype=torch.bool))


def attach_partly(missing: int, reason: str | None) -> Callable[[nn.Module, Recorder], Any]:
    """Attaches to all layers but one, which is skipped for a reason or forgotten."""

    @contextmanager
    def attach(model: nn.Module, recorder: Recorder) -> Iterator[Forward]:
        with attach_decoder(model, recorder) as forward:
            attention = model.model.layers[missing].self_attn
            probe, attention.recorder = attention.recorder, None
            recorder.expected_layers = L
            if reason:
                recorder.skip(missing, reason)
            yield forward
            attention.recorder = probe

    return attach


def test_layers_without_softmax_attention_are_named_and_left_out() -> None:
    decoder, tokens = make_decoder(), make_tokens()
    whole, found = measure(decoder, tokens), measure(decoder, tokens, attach_partly(1, "linear attention"))
    assert found.skipped == {1: "linear attention"}
    assert [layer.layer for layer in found.layers] == [0, 2] and [one.layer for one in found.other_layers] == [1]
    assert found.mean("sink_rate") == pytest.approx(
        (whole.layer_means("sink_rate")[0] + whole.layer_means("sink_rate")[2]) / 2
    )
    assert found.summary()["mean_activation_maximum"] == whole.summary()["mean_activation_maximum"]
    assert found.to_mapping()["skipped"] == {"1": "linear attention"}


def test_a_layer_that_was_not_seen_is_named() -> None:
    message = "Decoder let its attention be observed in 2 of 3 layers; nothing came from 1"
    with pytest.raises(ValueError, match=message):
        measure(make_decoder(), make_tokens(), attach_partly(1, None))


def test_the_head_is_not_run() -> None:
    decoder, heads = make_decoder(), []
    decoder.logits = heads.append
    measure(decoder, make_tokens())
    assert heads == []

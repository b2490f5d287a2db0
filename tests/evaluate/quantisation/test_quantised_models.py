"""Whole decoders under a scheme: which layers take part, that the model comes back, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, tiny_decoder
from torch import Tensor, nn

from gatelab.evaluate.quantisation.inputs import measure_inputs
from gatelab.evaluate.quantisation.layers import Place, linear_layers, require_roundable
from gatelab.evaluate.quantisation.schemes import SCHEMES, Scheme
from gatelab.evaluate.quantisation.simulated import quantised
from gatelab.evaluate.quantisation.trial import text_losses
from gatelab.interop.int8 import round_to_int8
from gatelab.model.decoder import Decoder
from gatelab.model.settings import MixtureSettings

WIDTHS = {"width": 32, "feedforward_width": 96, "head_size": 16}
ATTENTION, FEEDFORWARD = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (3, 29), generator=torch.Generator().manual_seed(4))


@pytest.fixture
def calibration() -> Tensor:
    """No token twice, so that no two values of the first layer's input are equal."""
    return torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(7)).view(8, 40)


def tiny_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(6)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.1,
    )
    return transformers.LlamaForCausalLM(config).eval()


def gated() -> Decoder:
    return tiny_decoder(**WIDTHS)


@torch.no_grad()
def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    output = model(tokens)
    return output if isinstance(output, Tensor) else output.logits


@pytest.mark.parametrize("build", [gated, tiny_llama])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_model_changes_and_comes_back(build: Any, name: str, tokens: Tensor, calibration: Tensor) -> None:
    model = build()
    before, expected = copy.deepcopy(model.state_dict()), logits_of(model, tokens)
    places = {key: tensor.data_ptr() for key, tensor in model.state_dict().items()}
    with quantised(model, SCHEMES[name], calibration):
        found = logits_of(model, tokens)
        embedding = model.get_input_embeddings() if hasattr(model, "config") else model.model.embed_tokens
        assert embedding.weight.data_ptr() in places.values()
    error = float((found - expected).norm() / expected.norm())
    assert 1e-5 < error < 0.7, "a scheme that changes nothing, or everything"
    assert torch.equal(logits_of(model, tokens), expected)
    after = model.state_dict()
    assert all(torch.equal(before[key], tensor) for key, tensor in after.items())
    assert {key: tensor.data_ptr() for key, tensor in after.items()} == places
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_model_comes_back_after_an_error(tokens: Tensor, calibration: Tensor) -> None:
    model = gated()
    expected = logits_of(model, tokens)
    with pytest.raises(RuntimeError, match="stop"), quantised(model, SCHEMES["w8a8"], calibration):
        raise RuntimeError("stop")
    assert torch.equal(logits_of(model, tokens), expected)


def test_more_bits_err_less(tokens: Tensor, calibration: Tensor) -> None:
    model = gated()
    expected, errors = logits_of(model, tokens), []
    for bits in range(2, 9):
        levels = {"levels": {"bits": bits}}
        scheme = Scheme.parse({"origin": "here", "weights": levels, "activations": {**levels, "per": "token"}})
        with quantised(model, scheme):
            errors.append(float((logits_of(model, tokens) - expected).norm() / expected.norm()))
    assert errors == sorted(errors, reverse=True) and errors[0] > 20 * errors[-1]


def test_weights_alone_are_those_of_the_int8_policy(tokens: Tensor) -> None:
    model, by_policy = gated(), gated()
    round_to_int8(by_policy, gates=True)
    with quantised(model, SCHEMES["int8_weights"]):
        assert torch.equal(logits_of(model, tokens), logits_of(by_policy, tokens))
    kept = gated()
    round_to_int8(kept)
    with quantised(model, SCHEMES["int8_weights"], gates=False):
        assert torch.equal(logits_of(model, tokens), logits_of(kept, tokens))


def test_all_linear_layers_inside_the_layers_take_part() -> None:
    of_gates = ["self_attn.gates.sdpa_output.projection"]
    expected = [f"self_attn.{name}" for name in ATTENTION] + of_gates + [f"mlp.{name}" for name in FEEDFORWARD]
    decoder = gated()
    assert list(linear_layers(decoder)) == [Place(layer, name) for layer in range(3) for name in expected]
    kept = linear_layers(decoder, gates=False)
    assert linear_layers(decoder).keys() - kept.keys() == {Place(layer, of_gates[0]) for layer in range(3)}
    assert {place.name for place in linear_layers(tiny_llama())} == set(expected) - {*of_gates}
    low_rank = tiny_decoder("sdpa_low_rank", **WIDTHS)
    assert {place.name for place in linear_layers(low_rank) if "gates" in place.name} == {
        f"{of_gates[0]}.{part}" for part in ("down", "up")
    }


def test_routers_and_experts_are_left_alone() -> None:
    mixture = MixtureSettings(num_experts=4, experts_per_token=2, expert_width=16, shared_width=24, shared_gate=True)
    names = {place.name for place in linear_layers(tiny_decoder(mixture=mixture, **WIDTHS)) if "mlp" in place.name}
    assert names == {f"mlp.shared_expert.{name}" for name in FEEDFORWARD}


def test_gates_of_a_known_family_can_be_left_out() -> None:
    class TheirAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.gate_proj = nn.Linear(5, 7), nn.Linear(5, 7)

    class TheirModel(nn.Module):
        def __init__(self, family: str) -> None:
            super().__init__()
            self.config = type("Config", (), {"model_type": family})()
            self.layers = nn.ModuleList([TheirAttention()])

    assert list(linear_layers(TheirModel("afmoe"), gates=False)) == [Place(0, "q_proj")]
    with pytest.raises(
        ValueError, match="TheirModel has no gate with a linear layer of its own to leave out; quantise"
    ):
        linear_layers(TheirModel("qwen3_next"), gates=False)


@pytest.mark.parametrize("build", [gated, tiny_llama])
def test_inputs_are_those_of_the_layers(build: Any, tokens: Tensor) -> None:
    model = build()
    layers = linear_layers(model)
    found = measure_inputs(model, layers, tokens)
    seen: dict[Place, list[Tensor]] = {place: [] for place in layers}
    handles = [
        linear.register_forward_pre_hook(lambda module, inputs, place=place: seen[place].append(inputs[0].double()))
        for place, linear in layers.items()
    ]
    with torch.no_grad():
        for window in tokens:
            model(window[None])
    for handle in handles:
        handle.remove()
    assert [read.layer for read in found] == [layer for layer in range(3) for _ in range(4)]
    assert {Place(read.layer, name) for read in found for name in read.readers} == set(layers)
    for read in found:
        values = torch.cat([*seen[Place(read.layer, read.readers[0])]], dim=1)[0]
        for name in read.readers:
            assert torch.equal(values, torch.cat(seen[Place(read.layer, name)], dim=1)[0])
        centred = values - values.mean(-1, keepdim=True)
        kurtosis = (centred**4).mean(-1) / (centred**2).mean(-1) ** 2
        assert read.statistics.kurtosis == pytest.approx(float(kurtosis.mean()), rel=1e-4)
        assert read.statistics.value == pytest.approx(float(values.abs().max()))
        assert read.statistics.tokens == tokens.numel()


def test_clipped_shares_count_what_lies_beyond_the_range(tokens: Tensor, calibration: Tensor) -> None:
    model = gated()
    with quantised(model, SCHEMES["w8a8_percentile"], calibration) as clipped:
        text_losses(model, calibration)
        on_calibration = {place: share.value for place, share in clipped.items()}
    first = Place(0, "self_attn.q_proj")
    expected = 2 * int(1e-4 * calibration.numel() * WIDTHS["width"]) / (calibration.numel() * WIDTHS["width"])
    assert on_calibration.keys() == linear_layers(model).keys()
    assert on_calibration[first] == expected > 0, "nothing before the first layer is rounded"
    with quantised(model, SCHEMES["w8a8_per_token"]) as clipped:
        text_losses(model, tokens)
    assert clipped == {}


def test_losses_are_those_of_torch(tokens: Tensor) -> None:
    model = gated()
    expected = [
        float(nn.functional.cross_entropy(logits_of(model, row[None])[0, :-1].double(), row[1:])) for row in tokens
    ]
    assert text_losses(model, tokens) == pytest.approx(expected, rel=1e-6)


def test_models_that_cannot_be_quantised_are_refused(calibration: Tensor) -> None:
    with pytest.raises(
        ValueError, match=r"the layers of Bare have no torch.nn.Linear to quantise; open a decoder whose"
    ):
        linear_layers(type("Bare", (nn.Sequential,), {})(nn.ModuleList([nn.LayerNorm(5)])))
    with pytest.raises(ValueError, match="Linear has no list of layers"):
        linear_layers(nn.Linear(3, 5))
    model = tiny_decoder()
    with pytest.raises(ValueError, match=r"^layer 0, self_attn.q_proj has 24 inputs, which groups of 32 don't divide"):
        require_roundable(linear_layers(model), SCHEMES["w4_group32"])
    empty = {Place(2, "up"): nn.Linear(3, 5)}
    empty[Place(2, "up")].weight = nn.Parameter(torch.zeros(5, 0))
    with pytest.raises(ValueError, match=r"layer 2, up has weights of shape \(5, 0\): there is nothing to round"):
        require_roundable(empty, SCHEMES["fp8"])
    integers = nn.Linear(3, 5)
    integers.weight = nn.Parameter(torch.zeros(5, 3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"has torch.int8 weights, quantised already; open the model unquantised"):
        require_roundable({Place(1, "down"): integers}, SCHEMES["fp8"])


@pytest.mark.parametrize(
    ("scheme", "tokens", "message"),
    [
        ("w8a8", None, "static ranges are measured on a text, and there is none; give windows to calibrate on"),
        ("fp8", (0, 29), "static ranges are measured on a text, and there is none"),
        ("w8a8_percentile", (2, 19), r"38 tokens with 32 inputs have no value in a tail of 0.0001; calibrate on at "
         "least 313 tokens"),
    ],
)  # fmt: skip
def test_a_calibration_that_is_too_short_is_refused_before_any_pass(
    scheme: str, tokens: tuple[int, int] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "forward", lambda *arguments: pytest.fail("the model was run"))
    windows = None if tokens is None else torch.zeros(tokens, dtype=torch.int64)
    with pytest.raises(ValueError, match=message), quantised(gated(), SCHEMES[scheme], windows):
        pass


def test_a_layer_that_no_token_reaches_is_named(calibration: Tensor) -> None:
    model = gated()
    model.model.layers[1].add_module("unused", nn.Linear(5, 7))
    with (
        pytest.raises(ValueError, match="no token to calibrate on reaches layer 1, unused; calibrate on more text"),
        quantised(model, SCHEMES["w8a8"], calibration),
    ):
        pass

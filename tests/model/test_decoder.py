"""The whole decoder: causality, its head, dtypes, refusals."""

from __future__ import annotations

import pytest
import torch
from tiny_decoders import ARCHITECTURES, FAMILIES, MIXTURE, SINKS, B, T, V, tiny_decoder, tiny_settings, token_ids

from gatelab.gates.variants import VARIANTS
from gatelab.model.cache import KVCache
from gatelab.model.settings import MixtureSettings, ModelSettings, RopeSettings

CHANGED = 11  # the token that tests change


def logits_before_and_after_a_change(settings: ModelSettings, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    decoder = tiny_decoder(settings, dtype)
    ids = token_ids()
    changed = ids.clone()
    changed[:, CHANGED] = (ids[:, CHANGED] + 1) % V
    with torch.no_grad():
        return decoder(ids), decoder(changed)


@pytest.mark.parametrize("gate", VARIANTS)
def test_no_gate_lets_the_future_in(gate: str) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        before, after = logits_before_and_after_a_change(tiny_settings(gate), dtype)
        assert torch.equal(before[:, :CHANGED], after[:, :CHANGED])
        assert ((before - after)[:, CHANGED:].abs().amax(-1) > 0).all(), "every later token sees the change"


def test_experts_do_not_let_the_future_in() -> None:
    """Equal up to rounding: the sizes of the groups that are multiplied change with the routing."""
    settings = tiny_settings("sdpa_elementwise", mixture=MIXTURE)
    before, after = logits_before_and_after_a_change(settings, torch.float64)
    torch.testing.assert_close(before[:, :CHANGED], after[:, :CHANGED], rtol=0, atol=1e-12)
    before, after = logits_before_and_after_a_change(settings, torch.float32)
    torch.testing.assert_close(before[:, :CHANGED], after[:, :CHANGED], rtol=0, atol=1e-4)


@pytest.mark.parametrize("mixture", [None, MIXTURE])
def test_without_causal_every_token_sees_every_token(mixture: MixtureSettings | None) -> None:
    before, after = logits_before_and_after_a_change(tiny_settings(causal=False, mixture=mixture), torch.float64)
    assert ((before - after).abs().amax(-1) > 1e-9).all()


def test_full_attention_ignores_the_order_of_tokens_but_for_rotation() -> None:
    """An oracle for causal=False: reversing the tokens reverses the logits, as distances only change sign and a
    rotation of no channels but two, which turn by next to nothing, is blind to that sign."""
    settings = tiny_settings(causal=False, rope=RopeSettings(fraction=0.25, base=1e30))
    decoder = tiny_decoder(settings)
    for layer in decoder.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data.unflatten(0, (-1, settings.head_size))[:, :2] = 0  # the two channels that turn
    ids = token_ids()
    with torch.no_grad():
        torch.testing.assert_close(decoder(ids.flip(1)).flip(1), decoder(ids), rtol=0, atol=1e-12)


@pytest.mark.parametrize("tied_head", [True, False])
def test_logits_are_products_of_the_final_state_with_the_head(tied_head: bool) -> None:
    decoder = tiny_decoder(tiny_settings(tied_head=tied_head))
    ids = token_ids()
    state = decoder.hidden(ids).state
    assert ("lm_head.weight" in decoder.state_dict()) is not tied_head
    head = decoder.state_dict()["model.embed_tokens.weight" if tied_head else "lm_head.weight"]
    expected = torch.stack([torch.stack([head @ token for token in row]) for row in state])
    torch.testing.assert_close(decoder(ids), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(decoder(ids), decoder.logits(state))


@pytest.mark.parametrize("name", ["dense", "mixture", "sandwich norm", "control", "own head", *FAMILIES, *SINKS])
def test_every_parameter_has_a_gradient(name: str) -> None:
    decoder = tiny_decoder(ARCHITECTURES[name], torch.float32)
    decoder(token_ids()).square().sum().backward()
    for parameter_name, parameter in decoder.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, parameter_name


def test_sandwich_norms_stand_at_the_end_of_each_branch() -> None:
    decoder = tiny_decoder(tiny_settings(sandwich_norm=True))
    layer = decoder.model.layers[0]
    rotation = decoder._where(token_ids(), None, None)[0][0]
    x = torch.randn(B, T, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    middle = x + layer.after_attention_norm(layer.self_attn(layer.input_layernorm(x), rotation))
    expected = middle + layer.after_feedforward_norm(layer.mlp(layer.post_attention_layernorm(middle)))
    assert torch.equal(layer(x, rotation)[0], expected)


@pytest.mark.parametrize("name", ["dense", "mixture", "own head", "control", "two gates", *FAMILIES, *SINKS])
def test_bfloat16_activations_on_float32_weights(name: str) -> None:
    """Weights keep float32 and get float32 gradients; the logits are near those of float64."""
    settings = ARCHITECTURES[name].model_copy(update={"init_std": 0.05})
    decoder = tiny_decoder(settings, torch.float32)
    exact = tiny_decoder(settings, torch.float64)(token_ids())
    decoder.activation_dtype = torch.bfloat16
    logits = decoder(token_ids())
    assert logits.dtype == torch.bfloat16
    logits.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in decoder.parameters())
    error = (logits.double() - exact).abs().mean() / exact.abs().mean()
    assert 1e-4 < error.item() < 0.05


def test_context_beyond_the_rotary_embedding_is_refused() -> None:
    decoder = tiny_decoder(tiny_settings(max_context=T - 1))
    message = "17 tokens exceed max_context=16 of the model; shorten the sequence or extend the rotary embedding"
    with pytest.raises(ValueError, match=f"^{message}$"):
        decoder(token_ids())
    cache = KVCache(num_layers=2)
    decoder(token_ids(num_tokens=T - 1), cache=cache)
    with pytest.raises(ValueError, match=f"^{message}$"):
        decoder(token_ids(num_tokens=1), cache=cache)
    assert cache.length == T - 1, "a refused call leaves the cache as it was"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_kv_heads": 4},
            "num_heads=6 is not divisible by num_kv_heads=4; each key/value head serves equally many",
        ),
        ({"rope": {"fraction": 0.375}}, "head_size=8 with rope.fraction=0.375 rotates 3 channels; the rotation needs"),
        ({"rope": {"fraction": 0.3}}, "head_size=8 with rope.fraction=0.3 rotates 2.4 channels"),
        ({"drawn_feedforward_width": 48}, "drawn_feedforward_width=48 is below the feed-forward width 56"),
        (
            {"mixture": {"num_experts": 4, "experts_per_token": 5, "expert_width": 8}},
            "mixture: experts_per_token=5 exce",
        ),
        ({"gates": [{"source": "prefix", "prefix_channels": 41}]}, "a gate reads prefix_channels=41 of width=40 chann"),
        ({"gates": [{"layers": [2]}]}, "a sdpa_output gate is on layer 2, but the last layer is 1"),
        ({"gates": [{}, {"layers": [1]}]}, "layer 1 has 2 gates at position sdpa_output; one is possible"),
        ({"feedforward": 56}, "'feedforward' is unknown; did you mean 'feedforward_width'?"),
        ({"width": 0}, "width cannot be 0"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        ModelSettings.parse({**tiny_settings().to_mapping(), **changes})
    assert str(refusal.value).startswith(message)


def test_settings_survive_yaml() -> None:
    for settings in ARCHITECTURES.values():
        assert ModelSettings.from_yaml(settings.to_yaml()) == settings

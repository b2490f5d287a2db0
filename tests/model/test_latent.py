"""Latent attention against loops, with every gate; what its cache holds, what it costs, and what it is refused with."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from latent_by_loops import latent_attention_by_loops
from tiny_decoders import B, T, latent_settings, tiny_decoder, token_ids
from torch import Tensor, nn

from gatelab.gates.spec import GateSpec
from gatelab.gates.variants import VARIANTS, find_variant
from gatelab.interop.norm_folding import fold_norms
from gatelab.model.accounting import count_parameters, flops_per_token_forward
from gatelab.model.attention import GroupedQueryAttention, fused_attention
from gatelab.model.cache import KVCache
from gatelab.model.decoder import with_rope
from gatelab.model.latent import LatentAttention
from gatelab.model.matching import with_gate
from gatelab.model.rope import rotation_at
from gatelab.model.settings import ModelSettings, RopeSettings

D, H, R, C, U, RANK, QUERY_RANK, CV = 40, 6, 4, 14, 10, 12, 11, 9
APPLICABLE = [name for name, variant in VARIANTS.items() if all(g.placement != "before_norm" for g in variant.gates)]
TOLERANCE = 1e-10


def attention_of(settings: ModelSettings) -> LatentAttention:
    """One float64 block whose gates reach logits of about 4; equal names get equal weights."""
    attention = LatentAttention(settings, 0).double()
    for name, parameter in attention.named_parameters():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = 1 + 0.2 * values if "norm" in name or name == "control.weight" else 0.3 * values
    return attention


def hidden_states() -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def run(settings: ModelSettings, attention: LatentAttention, hidden: Tensor, rotates: bool = True) -> Tensor:
    rotation = rotation_at(torch.arange(T)[None], settings.rope, settings.rotary_size, torch.float64)
    return attention(hidden, rotation if rotates else None)


def errors(settings: ModelSettings, rotates: bool = True) -> dict[str, float]:
    """The largest difference from the loops: of the output, and of the gradient of the input and each parameter."""
    attention, hidden = attention_of(settings), hidden_states().requires_grad_()
    inputs = {"hidden": hidden, **dict(attention.named_parameters())}
    output = run(settings, attention, hidden, rotates)
    expected = latent_attention_by_loops(settings, dict(attention.named_parameters()), hidden, rotates)
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, wanted = (torch.autograd.grad((y * probe).sum(), list(inputs.values())) for y in (output, expected))
    of_gradients = {name: (a - b).abs().max().item() for name, a, b in zip(inputs, found, wanted, strict=True)}
    return {"output": (output - expected).abs().max().item(), **of_gradients}


@pytest.mark.parametrize("gate", APPLICABLE)
def test_every_gate_equals_the_loops(gate: str) -> None:
    assert max(errors(latent_settings(gate)).values()) < TOLERANCE


@pytest.mark.parametrize("gate", ["none", "sdpa_elementwise", "value_elementwise"])
def test_latents_that_see_both_sides_equal_the_loops(gate: str) -> None:
    assert max(errors(latent_settings(gate, causal=False)).values()) < TOLERANCE


@pytest.mark.parametrize("value_size", [9, 14, 16])
@pytest.mark.parametrize("query_rank", [None, 11])
def test_shapes_equal_the_loops(query_rank: int | None, value_size: int) -> None:
    every = tuple(GateSpec(position=p) for p in ("sdpa_output", "value", "key", "query", "dense_output"))
    for gates in ((), every):
        settings = latent_settings(query_rank=query_rank, value_size=value_size, gates=gates)
        assert max(errors(settings).values()) < TOLERANCE


def test_without_rotation_equals_the_loops() -> None:
    assert max(errors(latent_settings("sdpa_elementwise"), rotates=False).values()) < TOLERANCE


def _dropped(attention: LatentAttention) -> None:
    attention.gates = nn.ModuleDict()


def _silu(attention: LatentAttention) -> None:
    gate = attention.gates["sdpa_output"]
    gate.spec = gate.spec.model_copy(update={"activation": "silu"})


def _channel_major(attention: LatentAttention) -> None:
    weight = attention.gates["sdpa_output"].projection.weight
    weight.data = weight.data.unflatten(0, (CV, H)).transpose(0, 1).flatten(0, 1).clone()


def _value_first(attention: LatentAttention) -> None:
    weight = attention.kv_b_proj.weight
    weight.data = weight.data.unflatten(0, (H, -1)).roll(CV, dims=1).flatten(0, 1).clone()


def _interleaved(attention: LatentAttention) -> None:
    weight = attention.kv_a_proj_with_mqa.weight
    order = [*range(RANK), *(RANK + i for i in (0, 2, 1, 3))]
    weight.data = weight.data[order].clone()


@pytest.mark.parametrize("mistake", [_dropped, _silu, _channel_major, _value_first, _interleaved])
def test_mistakes_differ_from_the_loops(mistake: Callable[[LatentAttention], None]) -> None:
    settings = latent_settings("sdpa_elementwise")
    attention, hidden = attention_of(settings), hidden_states()
    expected = latent_attention_by_loops(settings, dict(attention.named_parameters()), hidden)
    mistake(attention)
    assert (run(settings, attention, hidden) - expected).abs().max() > 1e-3


def test_parameter_names_and_shapes_are_those_of_deepseek() -> None:
    found = {name: tuple(one.shape) for name, one in LatentAttention(latent_settings(), 0).named_parameters()}
    common = {
        "kv_a_proj_with_mqa.weight": (RANK + R, D),
        "kv_a_layernorm.weight": (RANK,),
        "kv_b_proj.weight": (H * (U + CV), RANK),
        "o_proj.weight": (D, H * CV),
    }
    latents = {"q_a_proj.weight": (QUERY_RANK, D), "q_a_layernorm.weight": (QUERY_RANK,)}
    assert found == {**common, **latents, "q_b_proj.weight": (H * C, QUERY_RANK)}
    without = LatentAttention(latent_settings(query_rank=None), 0)
    assert {name: tuple(one.shape) for name, one in without.named_parameters()} == {
        **common,
        "q_proj.weight": (H * C, D),
    }


@pytest.mark.parametrize(
    ("gate", "heads", "channels"),
    [
        ("sdpa_elementwise", H, CV),
        ("sdpa_headwise", H, 1),
        ("value_elementwise", H, CV),
        ("key_elementwise", H, C),
        ("query_elementwise", H, C),
        ("dense_output_elementwise", 1, D),
    ],
)
def test_a_gate_has_the_channels_of_what_it_gates(gate: str, heads: int, channels: int) -> None:
    settings = latent_settings(gate)
    (only,) = LatentAttention(settings, 0).gates.values()
    assert only.projection.weight.shape == (heads * channels, D)
    assert find_variant(gate).num_parameters(settings.attention_shape) == heads * channels * D


def test_values_of_another_size_go_through_the_kernel_as_they_are() -> None:
    generator = torch.Generator().manual_seed(2)
    query, key = (torch.randn(B, T, H, C, generator=generator, dtype=torch.float64) for _ in range(2))
    for size in (CV, 16):
        value = torch.randn(B, T, H, size, generator=generator, dtype=torch.float64)
        weights = torch.einsum("bthc,bshc->bhts", query, key) / math.sqrt(C)
        weights = weights.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
        expected = torch.einsum("bhts,bshv->bthv", weights, value)
        torch.testing.assert_close(fused_attention(query, key, value, None, True), expected, rtol=0, atol=1e-12)


def cached_numbers(settings: ModelSettings) -> int:
    """Numbers that one layer's cache holds for a token."""
    decoder, cache = tiny_decoder(settings), KVCache(settings.num_layers)
    with torch.no_grad():
        decoder(token_ids(), cache=cache)
    layer = cache.layers[0]
    assert layer.keys is not None and layer.values is not None and layer.keys.shape[:2] == (B, T)
    return (layer.keys.numel() + layer.values.numel()) // (B * T)


def test_a_cache_holds_latents_alone() -> None:
    for gate in ("none", "sdpa_elementwise", "query_elementwise", "sdpa_from_value", "dense_output_elementwise"):
        assert cached_numbers(latent_settings(gate)) == RANK + R
    for gate in ("value_headwise", "key_elementwise"):
        assert cached_numbers(latent_settings(gate)) == H * (C + CV), "a gate makes keys or values of their own"


@pytest.mark.parametrize("gate", ["none", "sdpa_elementwise", "value_elementwise", "key_headwise", "query_after_rope"])
@torch.no_grad()
def test_greedy_decoding_with_a_cache_equals_reading_all_again(gate: str) -> None:
    settings = latent_settings(gate)
    decoder, cache = tiny_decoder(settings), KVCache(settings.num_layers)
    ids = token_ids(num_tokens=5)
    logits = decoder(ids, cache=cache)[:, -1:]
    for _ in range(30):
        plain = decoder(ids)[:, -1:]
        assert (logits - plain).abs().max() / plain.abs().max() < 1e-12
        ids = torch.cat((ids, logits.argmax(-1)), 1)
        logits = decoder(ids[:, -1:], cache=cache)
    assert len(ids.unique()) > 10


def test_yarn_scales_the_logits_of_latent_attention() -> None:
    """Softmax over the logits times (0.1 a ln s + 1)**2, as in DeepSeek's code; cosines keep the ratio of mscale."""
    yarn = {"kind": "yarn", "factor": 4.0, "original_context": 16, "mscale": 0.7, "mscale_all_dim": 0.7}
    settings = latent_settings(rope=RopeSettings.parse({"scaling": yarn}))
    plain = latent_settings(rope=RopeSettings.parse({"scaling": {**yarn, "mscale": None, "mscale_all_dim": None,
                                                                 "attention_factor": 1.0}}))  # fmt: skip
    attention, without = attention_of(settings), attention_of(plain)
    without.q_b_proj.weight.data *= (0.1 * 0.7 * math.log(4.0) + 1) ** 2
    found, expected = (run(s, a, hidden_states()) for s, a in ((settings, attention), (plain, without)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert (found - run(plain, attention_of(plain), hidden_states())).abs().max() > 1e-3


def test_another_rotation_keeps_the_weights() -> None:
    settings = latent_settings("sdpa_headwise")
    decoder = tiny_decoder(settings)
    rope = RopeSettings.parse({"scaling": {"kind": "linear", "factor": 2.0}})
    changed = with_rope(decoder, rope, 128)
    attention = changed.model.layers[0].self_attn
    assert isinstance(attention, LatentAttention)
    assert attention.q_b_proj.weight.data_ptr() == decoder.model.layers[0].self_attn.q_b_proj.weight.data_ptr()
    assert not torch.equal(changed(token_ids()), decoder(token_ids()))


def test_cost_by_hand() -> None:
    settings = latent_settings("sdpa_headwise")
    attention = D * QUERY_RANK + QUERY_RANK * H * C + D * (RANK + R) + RANK * H * (U + CV) + H * CV * D
    others = 3 * D * 56 + H * D
    norms = QUERY_RANK + RANK + 2 * D
    counts = count_parameters(settings)
    assert counts.total == 2 * (attention + others + norms) + D + 97 * D
    assert counts.gates == 2 * H * D
    expected = 2 * (2 * (attention + others) + 97 * D) + 2 * 2 * H * (C + CV) * (T + 1) / 2
    assert flops_per_token_forward(settings, T) == expected


def test_a_matched_gate_has_the_parameters_of_the_ungated_decoder() -> None:
    settings = latent_settings(feedforward_width=560, matching_multiple=1)
    matched = with_gate(settings, find_variant("sdpa_elementwise"), "parameters")
    added = count_parameters(matched).total - count_parameters(settings).total
    assert matched.feedforward_width == 560 - H * CV // 3 and added == 0


@torch.no_grad()
def test_norms_fold_into_the_projections_of_latents() -> None:
    decoder = tiny_decoder(latent_settings("sdpa_elementwise", query_rank=None))
    expected = decoder(token_ids())
    fold_norms(decoder)
    layer = decoder.model.layers[1]
    assert torch.equal(layer.input_layernorm.weight, torch.ones(D, dtype=torch.float64))
    assert not torch.equal(layer.self_attn.kv_a_layernorm.weight, torch.ones(RANK, dtype=torch.float64))
    torch.testing.assert_close(decoder(token_ids()), expected, rtol=0, atol=1e-11)


def test_without_latents_attention_has_grouped_queries() -> None:
    decoder = tiny_decoder(latent_settings(latent=None))
    assert isinstance(decoder.model.layers[0].self_attn, GroupedQueryAttention)


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "grouped heads": (
        {"num_kv_heads": 2},
        "num_kv_heads=2 does not go with latent attention: each head has its own keys and values; set num_kv_heads=6",
    ),
    "another head size": (
        {"head_size": 8},
        "head_size=8 does not go with latent attention: queries and keys have unrotated_size=10 and rotated_size=4 "
        "channels; set head_size=14",
    ),
    "q/k norm": (
        {"qk_norm": True},
        "qk_norm=True does not go with latent attention: its norms are those of the latents; set qk_norm=False",
    ),
    "biases": (
        {"biased_projections": ["q", "o"]},
        "biased_projections=['q', 'o'] does not go with latent attention: its projections have no biases; leave them "
        "to grouped-query attention (latent=null)",
    ),
    "a sink": (
        {"sink": {"kind": "learned_logit"}},
        "sink.kind=learned_logit does not go with latent attention: sinks are built for keys and values of one size; ",
    ),
    "other heads on a layer": (
        {"layers": [{}, {"num_heads": 12}]},
        "layers.1.num_heads=12 does not go with latent attention: its layers have equally many heads; set it to 6",
    ),
    "a share of channels": (
        {"rope": {"fraction": 0.5}},
        "rope.fraction=0.5 does not go with latent attention: latent.rotated_size says how many channels rotate; set "
        "rope.fraction=1",
    ),
    "a share on a layer": (
        {"layers": [{}, {"rope": {"fraction": 0.5}}]},
        "layers.1.rope.fraction=0.5 does not go with latent attention: latent.rotated_size says",
    ),
    "a gate before a norm": (
        {"gates": [{"position": "key", "placement": "before_norm"}]},
        "a key gate with placement=before_norm does not go with latent attention: no norm stands on its heads; choose "
        "after_norm, before the rotation, or after_rope",
    ),
    "an odd rotation": (
        {"head_size": 15, "latent": {"key_value_rank": 12, "unrotated_size": 10, "rotated_size": 5, "value_size": 9}},
        "latent.rotated_size=5 with rope.fraction=1.0 rotates 5 channels; the rotation needs an even number of them",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_with_latents_is_refused(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        ModelSettings.parse({**latent_settings().to_mapping(), **changes})

"""Scaled rotary frequencies against loops over pairs, and a decoder whose rotation is changed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny_decoders import tiny_settings

from gatelab.model.decoder import Decoder, with_rope
from gatelab.model.initialization import initialize
from gatelab.model.rope import attention_factor, inverse_frequencies, rotation_at
from gatelab.model.settings import LayerSettings, ModelSettings, RopeScaling, RopeSettings

C = 40
YARN: dict[str, Any] = {"kind": "yarn", "factor": 4.0, "original_context": 512}
LLAMA3: dict[str, Any] = {
    "kind": "llama3", "factor": 8.0, "original_context": 512, "low_frequency_factor": 1.0,
    "high_frequency_factor": 4.0,
}  # fmt: skip
SCALINGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "linear": {"kind": "linear", "factor": 3.0},
    "ntk": {"kind": "ntk", "factor": 4.0},
    "yarn": YARN,
    "yarn without rounding": YARN | {"truncate": False},
    "yarn, other bounds": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "llama3": LLAMA3,
}


def rope(scaling: dict[str, Any] | None, **changes: Any) -> RopeSettings:
    return RopeSettings.parse({"base": 300.0, "scaling": scaling, **changes})


def frequencies_by_loops(settings: RopeSettings, head_size: int) -> list[float]:
    """The definitions, one pair at a time."""
    rotated, scaling = int(head_size * settings.fraction), settings.scaling
    plain = [settings.base ** (-2 * i / rotated) for i in range(rotated // 2)]
    if scaling is None:
        return plain
    factor = scaling.factor
    if scaling.kind == "linear":
        return [frequency / factor for frequency in plain]
    if scaling.kind == "ntk":
        return [(settings.base * factor ** (rotated / (rotated - 2))) ** (-2 * i / rotated) for i in range(len(plain))]
    context = scaling.original_context
    assert context is not None
    result = []
    for i, frequency in enumerate(plain):
        turns = context * frequency / (2 * math.pi)
        if scaling.kind == "llama3":
            low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
            assert low is not None and high is not None
            kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        else:
            kept = 1 - yarn_interpolated(i, rotated, settings.base, scaling)
        result.append(kept * frequency + (1 - kept) * frequency / factor)
    return result


def yarn_interpolated(i: int, rotated: int, base: float, scaling: RopeScaling) -> float:
    """0 up to the pair that turns beta_fast times over the original context, 1 from the one of beta_slow."""
    context = scaling.original_context
    assert context is not None
    bounds = [
        rotated / 2 * math.log(context / (2 * math.pi * turns), base)
        for turns in (scaling.beta_fast, scaling.beta_slow)
    ]
    first, last = (math.floor(bounds[0]), math.ceil(bounds[1])) if scaling.truncate else bounds
    first, last = max(first, 0), min(last, rotated - 1)
    return min(max((i - first) / (last - first), 0.0), 1.0)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_the_definitions(name: str, fraction: float) -> None:
    settings = rope(SCALINGS[name], fraction=fraction)
    expected = frequencies_by_loops(settings, C)
    assert inverse_frequencies(settings, C, torch.float64).tolist() == pytest.approx(expected, rel=1e-12)
    single = inverse_frequencies(settings, C)
    assert single.dtype == torch.float32 and single.tolist() == pytest.approx(expected, rel=1e-6)


def test_scalings_differ_from_each_other() -> None:
    found = {tuple(inverse_frequencies(rope(scaling), C).tolist()) for scaling in SCALINGS.values()}
    assert len(found) == len(SCALINGS)


def test_ntk_keeps_the_fastest_pair_and_interpolates_the_slowest() -> None:
    ntk, linear = inverse_frequencies(rope(SCALINGS["ntk"]), C), inverse_frequencies(rope(None), C) / 4
    assert ntk[0] == 1 and float(ntk[-1]) == pytest.approx(float(linear[-1]), rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0),
        ({"attention_factor": 0.7}, 0.7),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        ({"attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 0.5}, 1.5),
    ],
)
def test_attention_factor_multiplies_cosines_and_sines(changes: dict[str, float], expected: float) -> None:
    settings = rope(YARN | changes)
    assert attention_factor(settings.scaling) == pytest.approx(expected, rel=1e-12)
    rotation = rotation_at(torch.tensor([[0, 17]]), settings, C, torch.float64)
    length = (rotation.cos**2 + rotation.sin**2).sqrt()
    assert torch.allclose(length, torch.full_like(length, expected), rtol=1e-12)


@pytest.mark.parametrize("name", ["plain", "linear", "ntk", "llama3"])
def test_attention_factor_is_of_yarn_alone(name: str) -> None:
    assert attention_factor(rope(SCALINGS[name]).scaling) == 1.0


@pytest.mark.parametrize("name", SCALINGS)
def test_angles_of_a_bfloat16_model_are_those_of_float32(name: str) -> None:
    positions = torch.tensor([[1023, 4095]])
    narrow, wide = (rotation_at(positions, rope(SCALINGS[name]), C, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert torch.equal(narrow.cos, wide.cos.bfloat16()) and torch.equal(narrow.sin, wide.sin.bfloat16())


REFUSED = [
    ({"kind": "yarn", "factor": 4}, "scaling: kind=yarn needs original_context, which has no safe default"),
    ({"kind": "llama3", "factor": 4, "original_context": 8}, "kind=llama3 needs low_frequency_factor"),
    ({"kind": "linear", "factor": 2, "beta_fast": 16}, "beta_fast=16.0 has no meaning with kind=linear; leave it out"),
    ({"kind": "linear", "factor": 0.5}, "scaling.factor cannot be 0.5"),
    (YARN | {"mscale": 1}, "mscale and mscale_all_dim make one ratio; give both, or attention_factor"),
    (YARN | {"beta_fast": 1}, "beta_fast=1 is not above beta_slow=1"),
    (LLAMA3 | {"high_frequency_factor": 1}, "high_frequency_factor=1 is not above low_frequency_factor=1"),
    ({"kind": "dynamic", "factor": 2}, "scaling.kind cannot be 'dynamic'; .*choices are: linear, ntk, yarn, llama3"),
]


@pytest.mark.parametrize(("scaling", "message"), REFUSED)
def test_what_is_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope(scaling)


def test_ntk_needs_more_than_one_pair() -> None:
    with pytest.raises(
        ValueError, match=r"rope\.scaling\.kind=ntk changes the base of slower pairs, and only one pair"
    ):
        tiny_settings(rope=rope({"kind": "ntk", "factor": 2}, fraction=0.25))


def tiny(**changes: Any) -> Decoder:
    decoder = Decoder(tiny_settings(num_layers=2, max_context=17, **changes))
    initialize(decoder, 0)
    return decoder.double().eval()


@torch.no_grad()
def test_another_rotation_takes_effect_on_the_same_weights() -> None:
    decoder = tiny()
    ids = torch.randint(97, (3, 17), generator=torch.Generator().manual_seed(0))
    settings = rope({"kind": "yarn", "factor": 4, "original_context": 17})
    changed = with_rope(decoder, settings, 68)
    assert changed.settings.rope == settings and changed.settings.max_context == 68 and not changed.training
    assert not torch.allclose(changed(ids), decoder(ids), atol=1e-3)
    built = Decoder(changed.settings).double()
    built.load_state_dict(decoder.state_dict())
    assert torch.equal(changed(ids), built(ids))
    assert torch.equal(with_rope(changed, decoder.settings.rope, 17)(ids), decoder(ids))
    assert changed.model.embed_tokens.weight.data_ptr() == decoder.model.embed_tokens.weight.data_ptr()
    with pytest.raises(ValueError, match="18 tokens exceed max_context=17"):
        decoder(torch.zeros(1, 18, dtype=torch.int64))
    assert changed(torch.zeros(1, 68, dtype=torch.int64)).shape == (1, 68, 97)


def test_settings_of_a_decoder_cannot_be_replaced() -> None:
    decoder = tiny()
    with pytest.raises(ValueError, match=r"keeps the settings that it was built from; .*with_rope\(decoder"):
        decoder.settings = decoder.settings.with_rope(rope(YARN), 2048)
    assert decoder.settings.rope.scaling is None


def mixed(*layers: LayerSettings) -> ModelSettings:
    return tiny_settings(num_layers=len(layers), layers=layers, rope=RopeSettings(base=90.0))


def test_layers_with_a_window_keep_their_rotation() -> None:
    whole = LayerSettings(rope=RopeSettings(base=500.0))
    settings = mixed(LayerSettings(window=5), whole, LayerSettings(rotary=False), LayerSettings(window=5, rotary=False))
    assert settings.long_rope.base == 500.0
    changed = settings.with_rope(rope(YARN), 2048)
    assert [changed.rope_on_layer(layer) for layer in range(4)] == [RopeSettings(base=90.0), rope(YARN), None, None]
    assert [changed.on_layer(layer).window for layer in range(4)] == [5, None, None, 5]


@pytest.mark.parametrize(
    ("layers", "number"),
    [((LayerSettings(window=5), LayerSettings(window=5)), 0), ((LayerSettings(), LayerSettings(rope=rope(YARN))), 2)],
)
def test_there_is_one_rotation_to_change(layers: tuple[LayerSettings, ...], number: int) -> None:
    with pytest.raises(ValueError, match=f"the layers without a window have {number} different rotations"):
        mixed(*layers).with_rope(rope(YARN), 2048)


def test_the_share_of_rotated_channels_stays() -> None:
    with pytest.raises(ValueError, match=r"rope.fraction=0.5 differs from the 1.0 that was trained with"):
        tiny_settings().with_rope(rope(None, fraction=0.5), 2048)

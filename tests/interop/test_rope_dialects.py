"""Rotations of transformers' configurations: frequencies bit-equal to theirs, dialects, traps, round trips."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import build, change_config, saved, token_ids
from tiny_families import build as build_family
from tiny_hugging_face import tiny_decoder, tiny_pair, tiny_settings

from gatelab.interop.config_keys import ConfigKeys
from gatelab.interop.convert import convert
from gatelab.interop.huggingface import from_decoder
from gatelab.interop.loading import load, open_checkpoint
from gatelab.interop.rope_change import change_rope
from gatelab.interop.rope_dialects import old_rope_keys, rope_parameters, ropes
from gatelab.model.decoder import with_rope
from gatelab.model.rope import attention_factor, inverse_frequencies
from gatelab.model.settings import RopeScaling, RopeSettings

transformers = pytest.importorskip("transformers")
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

ORIGINAL = "original_max_position_embeddings"
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, ORIGINAL: 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED: dict[str, dict[str, Any]] = {
    "linear": LINEAR,
    "yarn": YARN,
    "yarn, bounds": YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
    "yarn, not rounded": YARN | {"truncate": False},
    "yarn, attention factor": YARN | {"attention_factor": 0.8},
    "yarn, mscale pair": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, zeros": YARN | {"mscale": 0.0, "beta_fast": 0.0},
    "llama3": LLAMA3,
}


def read(config: dict[str, Any], kinds: list[str] | None = None, fraction: float | None = None) -> list[RopeSettings]:
    keys = ConfigKeys({"model_type": "qwen3", "max_position_embeddings": 4096} | config)
    return ropes(keys, kinds or ["full_attention"], fraction)


def theirs(head_size: int, max_context: int, parameters: dict[str, Any]) -> tuple[torch.Tensor, float]:
    config = transformers.LlamaConfig(
        hidden_size=4 * head_size, num_attention_heads=4, head_dim=head_size, max_position_embeddings=max_context,
        rope_parameters=dict(parameters),
    )  # fmt: skip
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)


@pytest.mark.parametrize("head_size", [8, 64, 128])
@pytest.mark.parametrize("base", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("name", SCALED)
def test_frequencies_are_bit_equal(name: str, base: float, head_size: int) -> None:
    for original, fraction in ((64, 1.0), (4096, 1.0), (32768, 0.5)):
        parameters = SCALED[name] | {"rope_theta": base, "partial_rotary_factor": fraction}
        if ORIGINAL in parameters:
            parameters[ORIGINAL] = original
        (rope,) = read({"rope_parameters": parameters}, fraction=1.0)
        expected, factor = theirs(head_size, 4 * original, parameters)
        assert torch.equal(inverse_frequencies(rope, head_size), expected)
        assert attention_factor(rope.scaling) == factor


def test_ntk_is_what_dynamic_gives_at_the_length_where_factors_agree() -> None:
    """transformers' dynamic at n tokens has s = f n / M - (f - 1); ours is fixed."""
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=512,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    )  # fmt: skip
    expected, factor = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=2048)
    ours = RopeSettings(base=1e4, scaling=RopeScaling(kind="ntk", factor=2 * 2048 / 512 - 1))
    assert torch.equal(inverse_frequencies(ours, 64), expected) and factor == 1.0


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", SCALED)
@torch.no_grad()
def test_scaled_models_load_with_equal_logits_and_go_back(family: str, name: str, tmp_path: Path) -> None:
    context = {"max_position_embeddings": 512, "rope_parameters": SCALED[name] | {"rope_theta": 500.0}}
    model = build(family, context)
    model.save_pretrained(tmp_path / "there")
    ids = token_ids()
    decoder = load(tmp_path / "there")
    assert decoder.settings.rope.scaling is not None
    torch.testing.assert_close(decoder(ids), model(ids).logits, rtol=1e-5, atol=1e-5)
    plain = with_rope(decoder, decoder.settings.rope.model_copy(update={"scaling": None}), 512)
    assert not torch.allclose(plain(ids), model(ids).logits, atol=1e-4)
    to = "qwen3" if family == "qwen3" else "gatelab"
    convert(tmp_path / "there", tmp_path / "back", to)
    assert load(tmp_path / "back").settings == decoder.settings
    if to == "qwen3":
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(from_decoder(decoder)(ids).logits, decoder(ids))


@torch.no_grad()
def test_ntk_is_written_as_the_plain_rotation_that_it_is(tmp_path: Path) -> None:
    rope = RopeSettings(base=500.0, scaling=RopeScaling(kind="ntk", factor=4.0))
    settings = tiny_settings("none", rope=rope)
    convert_from = tmp_path / "ours"
    from_decoder(decoder := tiny_decoder(settings)).save_pretrained(convert_from)
    convert(convert_from, tmp_path / "qwen3", "qwen3")
    config = json.loads((tmp_path / "qwen3" / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500.0 * 4 ** (8 / 6)}
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] and "rope_scaling" not in config
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "qwen3").eval()
    torch.testing.assert_close(again(token_ids()).logits, decoder(token_ids()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scaling", [LINEAR, YARN, YARN | {"attention_factor": 0.8, "truncate": False}, LLAMA3])
@pytest.mark.parametrize("write", [old_rope_keys, lambda rope, size: {"rope_parameters": rope_parameters(rope, size)}])
def test_both_dialects_are_written_and_read(scaling: dict[str, Any], write: Any) -> None:
    (rope,) = read({"rope_parameters": scaling | {"rope_theta": 700.0}})
    assert read(write(rope, 8)) == [rope]
    assert rope_parameters(rope, 8) == scaling | {"rope_theta": 700.0}


SAME = [
    {"rope_theta": 500.0, "rope_scaling": YARN},
    {"rope_theta": 500.0, "rope_scaling": {"type": "yarn", "factor": 4.0, ORIGINAL: 64}},
    {"rope_theta": 500.0, "rope_scaling": YARN | {"type": "yarn"}},
    {"rope_theta": 500.0, "rope_parameters": YARN},
    {"rope_parameters": YARN | {"rope_theta": 500.0, "attention_factor": None}},
    {"rope_theta": 500.0, "rope_scaling": YARN, "rope_parameters": YARN | {"rope_theta": 500.0}},
    {"rope_parameters": {"full_attention": YARN | {"rope_theta": 500.0}}},
]


@pytest.mark.parametrize("config", SAME)
def test_dialects_that_say_the_same(config: dict[str, Any]) -> None:
    scaling = RopeScaling(kind="yarn", factor=4.0, original_context=64)
    assert read(config) == [RopeSettings(base=500.0, scaling=scaling)]


THETA = {"rope_theta": 500.0}
REFUSED = [
    ({"rope_parameters": YARN}, "this qwen3 model lacks|rope settings of config.json lack 'rope_theta', .* no safe"),
    ({"rope_parameters": THETA | {"rope_type": "yarn", "factor": 4.0}},
     f"'yarn' without {ORIGINAL}; transformers takes max_position_embeddings=4096 for it, which changes all"),
    ({"rope_parameters": THETA | {"rope_type": "llama3", "factor": 4.0}}, f"'llama3' without {ORIGINAL}"),
    ({"rope_parameters": THETA | {"rope_type": "yarn", ORIGINAL: 64}}, "'yarn' without 'factor', which has no safe"),
    ({"rope_parameters": THETA | LLAMA3 | {"low_freq_factor": None}}, "'llama3' without 'low_freq_factor'"),
    ({"rope_parameters": THETA | YARN | {"low_freq_factor": 1.0}}, "low_freq_factor=1.0 among .* rope type 'yarn'"),
    ({"rope_parameters": THETA | {"rope_type": "dynamic", "factor": 2.0}}, "the rope type 'dynamic', whose base foll"),
    ({"rope_parameters": THETA | {"rope_type": "longrope"}}, "rope type 'longrope'; GateLab computes default, linear"),
    (THETA | {"rope_scaling": YARN | {"type": "linear"}}, "rope_scaling in .* has rope_type='yarn' and type='linear'"),
    (THETA | {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}},
     "has in rope_scaling factor=4.0 and in rope_parameters factor=2.0; remove the wrong one"),
    (THETA | {"rope_parameters": YARN | {"rope_theta": 9.0}}, "rope_theta=500.0 and in rope_parameters rope_theta=9.0"),
    (THETA | {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, "in rope_scaling rope_type=yarn and"),
    ({"rope_parameters": {"sliding_attention": THETA}}, "nothing for the full_attention of layer 0"),
    ({"rope_parameters": THETA | YARN | {"mscale": 1.0}}, "scaling: mscale and mscale_all_dim make one ratio"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(config)


NESTED = {
    "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 90.0},
    "full_attention": YARN | {"rope_theta": 500.0},
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def gemma(nested: dict[str, Any]) -> Any:
    config = transformers.Gemma3TextConfig(
        hidden_size=48, num_attention_heads=6, head_dim=64, num_hidden_layers=3, layer_types=KINDS,
        max_position_embeddings=256, rope_parameters=copy.deepcopy(nested),
    )  # fmt: skip
    return transformers.models.gemma3.modeling_gemma3.Gemma3RotaryEmbedding(config)


def test_each_layer_type_has_its_own_rotation() -> None:
    rotary = gemma(NESTED)
    for kind, rope in zip(KINDS, read(rotary.config.to_dict(), KINDS), strict=True):
        assert torch.equal(inverse_frequencies(rope, 64), getattr(rotary, f"{kind}_inv_freq"))
        assert attention_factor(rope.scaling) == getattr(rotary, f"{kind}_attention_scaling")


def test_truncate_by_layer_type_is_obeyed_where_transformers_overlooks_it() -> None:
    nested = NESTED | {"full_attention": NESTED["full_attention"] | {"truncate": False}}
    rope = read({"rope_parameters": nested}, KINDS)[1]
    flat, _ = theirs(64, 256, nested["full_attention"])
    assert torch.equal(inverse_frequencies(rope, 64), flat), "the same settings, flat, as transformers has them"
    overlooked = gemma(nested).full_attention_inv_freq
    assert torch.equal(overlooked, gemma(NESTED).full_attention_inv_freq), "transformers reads it now: drop this test"
    assert not torch.allclose(inverse_frequencies(rope, 64), overlooked, rtol=1e-3)


@torch.no_grad()
def test_a_family_with_scaling_by_layer_type_and_a_share_of_channels(tmp_path: Path) -> None:
    saved("laguna", tmp_path)
    nested = copy.deepcopy(json.loads((tmp_path / "config.json").read_text())["rope_parameters"])
    nested["full_attention"] |= YARN
    change_config(tmp_path, rope_parameters=nested)
    settings = open_checkpoint(tmp_path).settings
    assert settings.rope_on_layer(0) == RopeSettings(base=90.0)
    scaling = RopeScaling(kind="yarn", factor=4.0, original_context=64)
    assert settings.rope_on_layer(1) == RopeSettings(base=500.0, fraction=0.5, scaling=scaling)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(load(tmp_path)(token_ids()), model(token_ids()).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "glm4"])
@torch.no_grad()
def test_a_built_model_of_transformers_takes_another_rotation(family: str) -> None:
    model = build_family(family)
    ids = token_ids()
    before = model(ids).logits
    parameters = copy.deepcopy(model.config.rope_parameters)
    for values in [value for value in parameters.values() if isinstance(value, dict)] or [parameters]:
        values |= YARN | {ORIGINAL: 128}
    config = copy.deepcopy(model.config)
    model.config.rope_parameters = copy.deepcopy(parameters)
    assert torch.equal(model(ids).logits, before), "setting the configuration changes nothing: the trap"
    model.config.rope_parameters = config.rope_parameters
    change_rope(model, parameters, 512)
    after = model(ids).logits
    assert not torch.allclose(after, before, atol=1e-4)
    built = type(model)(model.config)
    built.load_state_dict(model.state_dict())
    assert torch.equal(built.eval()(ids).logits, after) and model.config.max_position_embeddings == 512


REFUSED_CHANGES = [
    ("llama", {"rope_type": "default", "rope_theta": 1e4}, "change no frequency of this llama model"),
    ("llama", {"rope_type": "default"}, "rope_parameters lack 'rope_theta', for which transformers would take a"),
    ("llama", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}, f"rope type 'yarn' lack '{ORIGINAL}'"),
    ("gemma3", {"full_attention": {"rope_type": "default"}}, "rope_parameters of full_attention lack 'rope_theta'"),
    ("gpt2", {"rope_type": "default", "rope_theta": 1e4}, "this gpt2 model has no rotary embedding that is known here"),
    ("gptj", {"rope_type": "default", "rope_theta": 1e4}, "this gptj model has no rotary embedding that is known here"),
]


@pytest.mark.parametrize(("family", "parameters", "message"), REFUSED_CHANGES)
@torch.no_grad()
def test_a_change_takes_effect_or_raises(family: str, parameters: dict[str, Any], message: str) -> None:
    model = build_family(family)
    before, config = model(token_ids()).logits, model.config.to_dict()
    with pytest.raises(ValueError, match=message):
        change_rope(model, parameters, 512)
    assert torch.equal(model(token_ids()).logits, before) and model.config.to_dict() == config


def test_the_configuration_of_our_own_model_cannot_be_set_to_another_rotation() -> None:
    _, model = tiny_pair("elementwise")
    changed = model.config.settings.with_rope(RopeSettings(base=77.0), 64).to_mapping()
    for key, value in {"gatelab": changed, "rope_parameters": YARN, "rope_theta": 77.0}.items():
        with pytest.raises(ValueError, match=f"{key} of a GateLabConfig can't be set to another rotation, which a mod"):
            setattr(model.config, key, value)
    with pytest.raises(ValueError, match="computes its rotation from its settings; change its decoder with"):
        change_rope(model, YARN | THETA, 512)

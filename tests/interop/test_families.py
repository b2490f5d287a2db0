"""Checkpoints of every family, saved by transformers, give its logits; what would be computed wrongly is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import FAMILIES, SIZES, change_config, saved, token_ids, transformers

from gatelab.gates.spec import GateSpec
from gatelab.interop.loading import load, open_checkpoint
from gatelab.model.settings import RopeSettings

MHA = {"num_key_value_heads": 6, "num_attention_heads_per_layer": [6, 6, 6], "num_sliding_attention_heads": 6}


@pytest.mark.parametrize("heads", ["grouped", "all"])
@pytest.mark.parametrize("name", list(FAMILIES))
@torch.no_grad()
def test_logits(name: str, heads: str, tmp_path: Path) -> None:
    fields = FAMILIES[name][1]
    mha = {key: value for key, value in MHA.items() if key in fields}
    model = saved(name, tmp_path, mha if heads == "all" else None)
    expected = model(token_ids()).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(load(tmp_path)(token_ids()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "layout", "gate"),
    [
        ("qwen3_next dense", "L2", GateSpec()),
        ("qwen3_next", "L2", GateSpec(bias=0.0)),
        ("qwen3_5", "L2", GateSpec()),
        ("afmoe", "L1", GateSpec()),
        ("laguna", "L1", GateSpec(granularity="headwise", activation="softplus", score_dtype="float32")),
        ("laguna elementwise", "L1", GateSpec(activation="softplus", score_dtype="float32")),
        ("step3p7", "L1", GateSpec(granularity="headwise")),
    ],
)
def test_gates(name: str, layout: str, gate: GateSpec, tmp_path: Path) -> None:
    saved(name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layout == layout
    assert checkpoint.settings.gates == (gate,)


def test_a_layout_that_contradicts_the_family_is_refused(tmp_path: Path) -> None:
    saved("qwen3_5_text", tmp_path)
    with torch.no_grad():
        assert torch.equal(load(tmp_path, layout="L2")(token_ids()), load(tmp_path)(token_ids()))
    for layout in ("L1", "L3", "L4", "L6"):
        with pytest.raises(ValueError, match=f"the layout argument says {layout}, the code of qwen3_5_text says L2; "):
            load(tmp_path, layout=layout)


def test_per_layer_settings(tmp_path: Path) -> None:
    saved("laguna", tmp_path)
    settings = open_checkpoint(tmp_path).settings
    assert [settings.shape_on_layer(layer).num_heads for layer in range(3)] == [6, 4, 6]
    assert [settings.on_layer(layer).window for layer in range(3)] == [7, None, 7]
    assert settings.rope_on_layer(0) == RopeSettings(base=90.0)
    assert settings.rope_on_layer(1) == RopeSettings(base=500.0, fraction=0.5)
    assert [settings.mixture_on_layer(layer) is None for layer in range(3)] == [True, False, False]


@pytest.mark.parametrize(
    "dialect",
    [
        {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": None},
        {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_theta": 500.0},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 500.0}}},
    ],
    ids=["version 4", "version 4 with a type", "both", "by layer type"],
)
def test_dialects_of_rope(dialect: dict[str, Any], tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    change_config(tmp_path, **dialect)
    assert open_checkpoint(tmp_path).settings.rope == RopeSettings(base=500.0)


PLAIN = {"rope_type": "default", "rope_theta": 500.0}
WRITTEN_OTHERWISE: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_next dense", {"rope_parameters": PLAIN}),
    ("qwen3_next dense", {"rope_parameters": PLAIN, "partial_rotary_factor": 0.5}),
    ("qwen3_next dense", {"rope_parameters": None, "rope_theta": 500.0, "partial_rotary_factor": 0.5}),
    ("qwen3_next dense", {"rope_parameters": None, "rope_theta": 500.0}),
    ("qwen3_5_text", {"rope_parameters": PLAIN | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}}),
    ("afmoe", {"rope_parameters": None, "rope_theta": 90.0}),
    ("afmoe", {"layer_types": None}),
    ("laguna", {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}}),
    ("laguna", {"mlp_layer_types": None}),
    ("qwen3", {"layer_types": None, "use_mrope": False}),
    ("qwen3 windows", {"layer_types": None, "max_window_layers": 1}),
    ("qwen2 windows", {"layer_types": None, "max_window_layers": 2}),
    ("qwen3_moe", {"num_local_experts": None, "num_experts": 5, "norm_topk_prob": None}),
]


@pytest.mark.parametrize(("name", "changes"), WRITTEN_OTHERWISE)
@torch.no_grad()
def test_defaults_and_dialects_mean_what_transformers_says(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    saved(name, tmp_path)
    change_config(tmp_path, **changes)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(load(tmp_path)(token_ids()), model(token_ids()).logits, rtol=1e-5, atol=1e-5)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "an unknown key": ("qwen3", {"logit_softcap": 30.0}, "could change the mathematics: logit_softcap=30.0; remove"),
    "two unknown keys": ("qwen3", {"b_key": 1, "a_key": "x"}, "mathematics: a_key='x', b_key=1; remove"),
    "an unknown flag that is off": ("llama", {"scale_attn_weights": False}, "mathematics: scale_attn_weights=False"),
    "quantised": ("llama", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
    "an activation": ("qwen3", {"hidden_act": "gelu"}, "hidden_act='gelu'; GateLab computes qwen3 models with 'silu'"),
    "a rope type": (
        "llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0}},
        "has the rope type 'llama3' without original_max_position_embeddings",
    ),
    "yarn in the old dialect": (
        "qwen3", {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        "has the rope type 'yarn' without original_max_position_embeddings",
    ),
    "an unknown rope key": (
        "qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0, "low": 1}}, "low=1 among its rope",
    ),
    "two ropes": ("qwen3", {"rope_theta": 600.0}, "rope_theta=600.0 and in rope_parameters rope_theta=500.0; remove"),
    "no rope": ("qwen3", {"rope_parameters": None}, "this qwen3 model lacks 'rope_theta', which has no safe default"),
    "no rope of a layer": (
        "laguna", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
        "rope_parameters in config.json has nothing for the sliding_attention of layer 0",
    ),
    "a part of each head": (
        "qwen3", {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5, but qwen3 rotates all",
    ),
    "no head size": ("qwen3", {"head_dim": None}, "this qwen3 model lacks 'head_dim', which has no safe default"),
    "linear layers": (
        "qwen3_next dense", {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        "this qwen3_next model has linear_attention on layers 0, 2; GateLab's decoder has softmax attention alone",
    ),
    "linear layers by default": (
        "qwen3_next dense", {"layer_types": None}, "has linear_attention on layers 0, 1, 2; GateLab's decoder",
    ),
    "too few layers": ("qwen3", {"layer_types": ["full_attention"]}, "1 layer_types for num_hidden_layers=3"),
    "no window": ("afmoe", {"sliding_window": None}, "layer 0 has sliding_attention, but config.json has no sliding"),
    "window not used": (
        "qwen3", {"layer_types": ["sliding_attention"] * 3}, "has sliding_attention layers, but no sliding_window that",
    ),
    "windows of a mixture": ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=True; GateLab computes"),
    "a gate off": ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate=False; GateLab computes qwen3_next"),
    "groups of experts": ("afmoe", {"n_group": 2}, "n_group=2; GateLab computes afmoe models with 1"),
    "a soft cap": ("laguna", {"moe_router_logit_softcapping": 5.0}, "moe_router_logit_softcapping=5.0"),
    "a clamp": ("step3p7", {"swiglu_limits": [0.0, 7.0, 0.0]}, "GateLab's feed-forward layers clamp nothing"),
    "a scale": ("step3p7", {"query_pre_attn_scalar": 9}, "query_pre_attn_scalar=9; GateLab computes step3p5 models"),
    "another family": ("qwen3", {"model_type": "olmo2"}, "model_type='olmo2'; GateLab loads the families qwen2, llama"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    name, changes, message = REFUSED[case]
    saved(name, tmp_path)
    if FAMILIES[name][0] == "step3p7":
        config = json.loads((tmp_path / "config.json").read_text())
        changes = {"text_config": {**config["text_config"], **changes}}
    change_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        load(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"output_gate_type": "swish"}, {"mamba_ssm_dtype": "float32", "attn_output_gate": True}]
)
def test_keys_of_linear_attention_change_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    saved("qwen3_5_text", tmp_path)
    change_config(tmp_path, **changes)
    assert open_checkpoint(tmp_path).settings.gates == (GateSpec(),)


def test_a_head_size_that_is_not_width_over_heads(tmp_path: Path) -> None:
    saved("llama", tmp_path, {"head_dim": 10})
    assert open_checkpoint(tmp_path).settings.head_size == 10 != SIZES["hidden_size"] // 6
    change_config(tmp_path, head_dim=None)
    with pytest.raises(ValueError, match=r"q_proj.weight the shape \(60, 48\), config.json asks for \(48, 48\)"):
        load(tmp_path)


@pytest.mark.parametrize("kept", ["embedding", "head", "both"])
@torch.no_grad()
def test_a_tied_head_is_saved_once_or_twice(kept: str, tmp_path: Path) -> None:
    model = saved("qwen3 tied", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    if kept != "head":
        tensors["model.embed_tokens.weight"] = embedding
    if kept != "embedding":
        tensors["lm_head.weight"] = embedding.clone()
    save_file(tensors, tmp_path / "model.safetensors")
    torch.testing.assert_close(load(tmp_path)(token_ids()), model(token_ids()).logits, rtol=1e-5, atol=1e-5)
    if kept == "both":
        save_file(tensors | {"lm_head.weight": 2 * embedding}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=r"tie_word_embeddings, but lm_head.weight differs from model.embed_tok"):
            load(tmp_path)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    norm = "model.layers.1.self_attn.q_norm.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != norm}, file)
    with pytest.raises(ValueError, match=f"the checkpoint has no tensor {norm}, which its config.json asks for"):
        load(tmp_path)
    save_file(tensors | {"model.layers.0.self_attn.gate_proj.weight": torch.zeros(48, 40)}, file)
    with pytest.raises(
        ValueError,
        match=r"tensors that its config.json does not tell of: model.layers.0.self_attn.gate_proj.weight; the",
    ):
        load(tmp_path)


@torch.no_grad()
def test_stacked_experts_and_the_names_of_a_compiled_model(tmp_path: Path) -> None:
    model = saved("qwen3_moe", tmp_path)
    stacked = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in stacked)
    save_file(stacked, tmp_path / "model.safetensors")
    torch.testing.assert_close(load(tmp_path)(token_ids()), model(token_ids()).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    model = saved("step3p7", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.3.enorm.weight": torch.ones(40)}, file)
    with pytest.raises(ValueError, match=r"does not tell of: model.layers.3.enorm.weight; their part"):
        load(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    change_config(tmp_path, text_config=text | {"num_nextn_predict_layers": 1})
    torch.testing.assert_close(load(tmp_path)(token_ids()), model(token_ids()).logits, rtol=1e-5, atol=1e-5)


def test_the_dtype_is_that_of_the_files(tmp_path: Path) -> None:
    model = saved("qwen3_5_text", tmp_path)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    decoder = load(tmp_path)
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}
    assert not decoder.training

"""Saved Hugging Face forms: complete, equal bit for bit when read again, and described."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

transformers = pytest.importorskip("transformers")

from tiny_hugging_face import MODELS, WHOLE, tiny_pair, tiny_settings, token_ids  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402

from gatelab.gates.gate import Gate  # noqa: E402
from gatelab.gates.spec import GateSpec  # noqa: E402
from gatelab.interop.huggingface import GateLabConfig, GateLabForCausalLM, GateLabModel, register  # noqa: E402
from gatelab.interop.model_card import ModelCard, describe_gate, render_model_card  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()
    register()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_round_trip_is_bit_equal(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    decoder, model = tiny_pair(name, dtype)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, GateLabForCausalLM)
    assert again.config.settings == decoder.settings
    saved, loaded = model.state_dict(), again.state_dict()
    assert saved.keys() == loaded.keys()
    assert all(loaded[name].dtype == dtype and torch.equal(tensor, loaded[name]) for name, tensor in saved.items())
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == decoder.settings.tied_head
    tolerance = 1e-5 if dtype == torch.float32 else 0.05  # equal weights at other addresses round otherwise
    torch.testing.assert_close(again(token_ids()).logits, decoder(token_ids()), atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_tensors_carry_the_names_of_the_decoder(name: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    decoder, model = tiny_pair(name)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(decoder.state_dict())


def test_shards_are_read_again(tmp_path: Path) -> None:
    decoder, model = tiny_pair("mixture")
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in decoder.state_dict().items())


def test_the_configuration_has_the_names_that_tools_read(tmp_path: Path) -> None:
    _, model = tiny_pair("windows")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "model_type": "gatelab", "architectures": ["GateLabForCausalLM"], "gate_layout": "L1",
        "gatelab_schema_version": 1, "vocab_size": 97, "hidden_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 56,
        "max_position_embeddings": 64, "tie_word_embeddings": True, "sliding_window": 5, "num_experts": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "dtype": "float32",
        "gatelab": model.config.settings.to_mapping(),
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected
    assert not {"auto_map", "base_model_tp_plan"} & config.keys()
    assert AutoConfig.from_pretrained(tmp_path).settings == model.config.settings


def rewritten(folder: Path, **changes: Any) -> Path:
    """The folder with other values in its config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def test_what_contradicts_or_is_newer_is_refused(tmp_path: Path) -> None:
    _, model = tiny_pair("elementwise")
    model.save_pretrained(tmp_path)
    refused = {
        "num_attention_heads": (4, "num_attention_heads=4 contradicts the model's settings, which say 6"),
        "gatelab_schema_version": (2, "gatelab_schema_version=2 is newer than this GateLab, which reads 1; upgrade"),
        "gate_layout": ("L2", "gate_layout=L2 can't be read here; convert the model to L1 first"),
        "gatelab": (None, "needs the model's settings; make one with GateLabConfig.from_settings"),
    }
    whole = json.loads((tmp_path / "config.json").read_text())
    for name, (value, wanted) in refused.items():
        with pytest.raises(ValueError, match=wanted):
            AutoConfig.from_pretrained(rewritten(tmp_path, **{name: value}))
        rewritten(tmp_path, **whole)
    assert AutoConfig.from_pretrained(tmp_path).num_attention_heads == 6


def test_a_fresh_model_starts_as_its_gates_specify() -> None:
    gates = (
        GateSpec(activation="double_sigmoid", initialization="zeros"),
        GateSpec(position="query", rank=3, bias=2.0),
        GateSpec(position="value", source="parameter", initialization="zeros"),
    )
    mixture = MODELS["mixture"].mixture
    settings = tiny_settings(gates=gates, centred_norms=True, biased_projections=("q",), mixture=mixture)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GateLabConfig.from_settings(settings))
    first = {gate.spec.position: gate for gate in model.modules() if isinstance(gate, Gate)}
    assert (first["sdpa_output"].projection.weight == 0).all()
    assert (first["query"].projection.up.bias == 2).all()
    assert first["query"].projection.up.weight.std().item() == pytest.approx(0.2, rel=0.3)
    assert (first["value"].logits == 0).all()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("q_proj.bias"):
            assert (parameter == 0).all(), name
        elif "gates" not in name:
            assert parameter.std().item() == pytest.approx(0.2, rel=0.15), name
    assert isinstance(AutoModel.from_config(model.config), GateLabModel)


def test_every_projection_is_in_the_tensor_parallel_plan() -> None:
    for name, settings in MODELS.items():
        _, model = tiny_pair(name)
        if model.config.base_model_tp_plan is None:
            assert name in WHOLE
            assert model.tp_plan == {}
            continue
        modules = {_wildcard(path) for path, _ in model.named_modules()}
        modules |= {_wildcard(path) for path, _ in model.named_parameters()}
        assert set(model.tp_plan) <= modules, name
        linears = {_wildcard(path) for path, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
        assert linears <= set(model.tp_plan), name
        gated = [path for path in model.tp_plan if ".gates." in path]
        assert bool(gated) == bool(settings.gates), name


def _wildcard(path: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def test_the_card_says_what_is_known(tmp_path: Path) -> None:
    _, model = tiny_pair("low rank and prefix")
    card = ModelCard(
        name="Tiny",
        recipe="gatelab train tiny",
        data="digits | of pi",
        license="mit",
        results={"perplexity": 12.345678},
    )
    model.save_pretrained(tmp_path, model_card=card)
    text = (tmp_path / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["gated-attention", "gatelab"],
        "license": "mit",
    }
    for line in (
        "# Tiny",
        "- sdpa_output, elementwise, sigmoid, multiply, rank=3, bias=0.5",
        "- query, elementwise, sigmoid, multiply, source=prefix, prefix_channels=12, placement=after_norm",
        "- recipe: gatelab train tiny",
        r"- data: digits \| of pi",
        "| perplexity | 12.3457 |",
    ):
        assert line in body.splitlines()


def test_a_card_that_is_there_stays(tmp_path: Path) -> None:
    _, model = tiny_pair("ungated")
    model.save_pretrained(tmp_path)
    assert "## Gates\n\n- none\n" in (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text("mine")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    model.save_pretrained(tmp_path, model_card=ModelCard(results={"a|b": "c"}))
    assert "| a\\|b | c |" in (tmp_path / "README.md").read_text()


def test_an_unknown_entry_of_a_card_is_refused() -> None:
    with pytest.raises(ValueError, match="'recepie' is unknown; did you mean 'recipe'"):
        ModelCard.parse({"recepie": "x"})
    assert describe_gate(GateSpec()) == "sdpa_output, elementwise, sigmoid, multiply"
    assert "not stated" in render_model_card(tiny_settings(), ModelCard())

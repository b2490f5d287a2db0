"""Folded norms leave the function as it is; int8 takes the projections that the policy names."""

from __future__ import annotations

import copy
import sys

import pytest
import torch

pytest.importorskip("transformers")

from tiny_hugging_face import MODELS, tiny_decoder, tiny_pair, token_ids

from gatelab.interop import norm_folding
from gatelab.interop.int8 import nearest_int8, round_to_int8, rounded_projections, torchao_config
from gatelab.interop.norm_folding import fold_norms


@pytest.mark.parametrize("name", MODELS)
def test_folding_keeps_the_function(name: str) -> None:
    decoder = tiny_decoder(MODELS[name], torch.float64)
    expected = decoder(token_ids())
    fold_norms(decoder)
    torch.testing.assert_close(decoder(token_ids()), expected, atol=1e-11, rtol=0)
    neutral = 0.0 if decoder.settings.centred_norms else 1.0
    for layer in decoder.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            assert (norm.weight == neutral).all()
    assert (decoder.model.norm.weight == neutral).all() != decoder.settings.tied_head


def test_a_gate_that_is_left_out_of_folding_changes_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny_decoder(MODELS["elementwise"], torch.float64)
    expected = decoder(token_ids())
    readers = norm_folding._readers_of_attention_input
    monkeypatch.setattr(norm_folding, "_readers_of_attention_input", lambda attention: list(readers(attention))[:3])
    fold_norms(decoder)
    assert (decoder(token_ids()) - expected).abs().max() > 0.01


def test_rounding_is_the_nearest_of_even_steps() -> None:
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    weight[2] = 0
    found = nearest_int8(weight)
    for row, rounded in zip(weight.tolist(), found.tolist(), strict=True):
        step = max(map(abs, row)) / 127.5
        for value, near in zip(row, rounded, strict=True):
            choices = [level * step for level in range(-128, 128)]
            assert abs(value - near) <= min(abs(value - choice) for choice in choices) + 1e-6
    assert (found[2] == 0).all()


def test_the_policy_leaves_gates_alone_unless_asked() -> None:
    decoder = tiny_decoder(MODELS["mixture"])
    layer = "model.layers.0"
    projections = {f"{layer}.self_attn.{name}_proj" for name in "qkvo"}
    shared = {f"{layer}.mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
    gates = {f"{layer}.self_attn.gates.{position}.projection" for position in ("sdpa_output", "value")}
    in_first = {name for name in rounded_projections(decoder) if name.startswith(layer)}
    assert in_first == projections | shared
    with_gates = {name for name in rounded_projections(decoder, gates=True) if name.startswith(layer)}
    assert with_gates == projections | shared | gates
    low_rank = rounded_projections(tiny_decoder(MODELS["low rank and prefix"]), gates=True)
    assert {f"{layer}.self_attn.gates.sdpa_output.projection.{name}" for name in ("down", "up")} <= set(low_rank)


@pytest.mark.parametrize("gates", [False, True])
def test_rounding_changes_the_named_weights_alone(gates: bool) -> None:
    decoder = tiny_decoder(MODELS["elementwise"])
    before = copy.deepcopy(decoder.state_dict())
    round_to_int8(decoder, gates)
    changed = {name for name, tensor in decoder.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {f"{name}.weight" for name in rounded_projections(decoder, gates)}


def test_torchao_is_needed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ValueError, match=r"needs torchao and transformers: install gatelab\[quant\]"):
        torchao_config(tiny_decoder(MODELS["ungated"]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("gates", [False, True])
def test_torchao_computes_what_rounding_computes(gates: bool, tmp_path) -> None:
    pytest.importorskip("torchao")
    from gatelab.interop.huggingface import GateLabForCausalLM

    decoder, model = tiny_pair("elementwise")
    model.save_pretrained(tmp_path)
    quantized = GateLabForCausalLM.from_pretrained(tmp_path, quantization_config=torchao_config(model, gates))
    rounded = copy.deepcopy(decoder)
    round_to_int8(rounded, gates)
    assert (rounded(token_ids()) - decoder(token_ids())).abs().max() > 0.01
    torch.testing.assert_close(quantized(token_ids()).logits, rounded(token_ids()), atol=1e-4, rtol=0)

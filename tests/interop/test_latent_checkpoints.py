"""Latent attention in files and in transformers: the order of rotated rows, gates, our Hugging Face form, refusals."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gatelab.gates.spec import GateSpec
from gatelab.gates.variants import find_variant
from gatelab.interop.convert import convert
from gatelab.interop.latents import halves_from_pairs, pairs_from_halves
from gatelab.interop.loading import load, open_checkpoint
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.latent import LatentAttention
from gatelab.model.settings import LatentSettings, LayerSettings, ModelSettings

transformers = pytest.importorskip("transformers")

B, T, V, D, H, CV = 3, 17, 97, 40, 6, 9
SIZES = {
    "vocab_size": V, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": H, "num_key_value_heads": H,
    "intermediate_size": 56, "max_position_embeddings": 64, "kv_lora_rank": 12, "q_lora_rank": 11,
    "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": CV, "first_k_dense_replace": 2,
}  # fmt: skip
LATENT = {"key_value_rank": 12, "unrotated_size": 10, "rotated_size": 8, "value_size": CV}


def token_ids() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(3))


def latent_decoder(gate: str = "none", **changes: Any) -> Decoder:
    """A float64 decoder with noise on every number."""
    sizes = {
        "vocab_size": V,
        "width": D,
        "num_layers": 2,
        "num_heads": H,
        "num_kv_heads": H,
        "head_size": 18,
        "feedforward_width": 56,
        "max_context": 64,
        "qk_norm": False,
        "latent": LatentSettings.parse({**LATENT, "query_rank": 11}),
        "init_std": 0.2,
        "gates": find_variant(gate).gates,
        "control": find_variant(gate).control,
    }
    decoder = Decoder(ModelSettings(**{**sizes, **changes})).double()
    initialize(decoder, 0)
    generator = torch.Generator().manual_seed(1)
    for parameter in decoder.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return decoder.eval()


def saved(folder: Path, **changes: Any) -> None:
    """A random DeepSeek-V3 of transformers."""
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**{**SIZES, **changes}))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(0.15 * torch.randn(tensor.shape))
    model.save_pretrained(folder)


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def test_rows_in_pairs_by_hand() -> None:
    """Two heads of three still channels and six that turn."""
    rows = torch.arange(18.0)[:, None]
    expected = [0, 1, 2, 3, 5, 7, 4, 6, 8, 9, 10, 11, 12, 14, 16, 13, 15, 17]
    assert halves_from_pairs(9, 6, rows)[:, 0].tolist() == expected
    assert torch.equal(pairs_from_halves(9, 6, halves_from_pairs(9, 6, rows)), rows)


@torch.no_grad()
@pytest.mark.parametrize("name", ["g_proj", "gate_proj"])
def test_a_gate_on_the_output_is_read_from_its_own_projection(name: str, tmp_path: Path) -> None:
    """The facts of Kimi-K3's latent layers: ``mla_use_output_gate``, elementwise on H Cv channels, sigmoid, no bias."""
    saved(tmp_path)
    plain, file = load(tmp_path), tmp_path / "model.safetensors"
    generator = torch.Generator().manual_seed(4)
    gates = {
        f"model.layers.{layer}.self_attn.{name}.weight": 0.3 * torch.randn(H * CV, D, generator=generator)
        for layer in range(2)
    }
    save_file(load_file(file) | gates, file, metadata={"format": "pt", "gate_layout": "L1"})
    change_config(tmp_path, mla_use_output_gate=True)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.settings.gates == (GateSpec(),) and checkpoint.layout == "L1"
    gated = load(tmp_path)
    for number, layer in enumerate(gated.model.layers):
        x = torch.randn(B, T, D, generator=generator)
        attention, ungated = layer.self_attn, plain.model.layers[number].self_attn
        scores = torch.sigmoid(x @ gates[f"model.layers.{number}.self_attn.{name}.weight"].T)
        assert (attention(x, None) - ungated(x, None)).abs().max() > 0.1
        ungated.o_proj.register_forward_pre_hook(partial(_gated, scores))
        torch.testing.assert_close(attention(x, None), ungated(x, None), rtol=1e-5, atol=1e-5)


def _gated(scores: Tensor, module: torch.nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] * scores,)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "biases": ({"attention_bias": True}, "attention_bias=True; GateLab computes deepseek_v3 models with False"),
    "grouped heads": ({"num_key_value_heads": 2}, "num_key_value_heads=2; GateLab computes deepseek_v3 models with 6"),
    "groups of experts": (
        {"first_k_dense_replace": 1},
        "config.json chooses experts in topk_group=4 of n_group=8 groups; GateLab's router chooses among all experts",
    ),
    "other scores": ({"scoring_func": "softmax"}, "config.json has scoring_func='softmax'; GateLab computes"),
    "no word on the queries": (
        {"q_lora_rank": ...},
        "the config.json of this deepseek_v3 model lacks 'q_lora_rank', which has no safe default",
    ),
    "no values": ({"v_head_dim": None}, "the config.json of this deepseek_v3 model lacks 'v_head_dim'"),
    "an unknown key": ({"qk_clip": 100}, "that could change the mathematics: qk_clip=100"),
    "a gate that is fused": (
        {"elementwise_attn_output_gate": True, "gate_layout": "L2"},
        "the gate layout L2 has the gate's rows among those of q_proj; with latent attention only a gate that has a",
    ),
    "a gate without its rows": (
        {"mla_use_output_gate": True, "gate_layout": "L1"},
        "the gate layout L1 does not fit these tensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    changes, message = REFUSED[case]
    saved(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        load(tmp_path)


@pytest.mark.parametrize(
    ("decoder", "to", "message"),
    [
        ({"gate": "sdpa_elementwise"}, "deepseek_v3", "it has gates, and the architecture has none"),
        ({}, "qwen3", "its attention has latents"),
        ({}, "official", "its attention has latents"),
        ({"latent": None, "qk_norm": True}, "deepseek_v3", "its attention has grouped queries"),
        (
            {"latent": LatentSettings.parse({**LATENT, "norm_epsilon": 0.1})},
            "deepseek_v3",
            "its latents' norms have epsilon=0.1, deepseek_v3 only 1e-06",
        ),
        ({"layers": (LayerSettings(window=5), LayerSettings())}, "deepseek_v3", "it has layers with a window of 5"),
    ],
)  # fmt: skip
def test_what_a_target_can_not_express(decoder: dict[str, Any], to: Any, message: str, tmp_path: Path) -> None:
    from gatelab.interop.huggingface import from_decoder

    from_decoder(latent_decoder(**decoder)).save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=f"can't be written as {to}: .*{re.escape(message)}"):
        convert(tmp_path / "source", tmp_path / "result", to=to)


GATES = ["none", "sdpa_elementwise", "value_headwise", "key_elementwise", "sdpa_from_value", "rms_norm_on_sdpa"]


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("gate", GATES)
def test_our_form_in_transformers(gate: str, implementation: str, tmp_path: Path) -> None:
    """Logits, and greedy decoding with a dynamic and a static cache; saved and loaded by name."""
    from gatelab.interop.huggingface import from_decoder, register, to_decoder

    decoder = latent_decoder(gate)
    from_decoder(decoder).save_pretrained(tmp_path)
    register()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=implementation)
    torch.testing.assert_close(model(token_ids()).logits, decoder(token_ids()), rtol=0, atol=1e-10)
    ids = token_ids()[:1, :5]
    for cache in ("dynamic", "static"):
        found = model.generate(ids, max_new_tokens=12, do_sample=False, cache_implementation=cache)
        wanted = ids
        for _ in range(found.shape[1] - 5):
            wanted = torch.cat((wanted, decoder(wanted)[:, -1:].argmax(-1)), 1)
        assert torch.equal(found, wanted)
    again = to_decoder(model)
    assert isinstance(again.model.layers[0].self_attn, LatentAttention)
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in decoder.state_dict().items())


@torch.no_grad()
def test_a_cache_of_transformers_holds_latents() -> None:
    from gatelab.interop.huggingface import from_decoder

    cache = from_decoder(latent_decoder("sdpa_elementwise"))(token_ids(), use_cache=True).cache
    assert [tuple(part.shape) for part in (cache.layers[0].keys, cache.layers[0].values)] == [
        (B, 1, T, 12),
        (B, 1, T, 8),
    ]


def test_latents_have_no_plan_of_transformers() -> None:
    from gatelab.interop.huggingface_config import GateLabConfig

    assert GateLabConfig.from_settings(latent_decoder().settings).base_model_tp_plan is None

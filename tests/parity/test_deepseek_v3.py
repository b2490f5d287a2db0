"""DeepSeek-V3 of transformers in float64: latent attention with the same logits and gradients, in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_checks import V, gradients, randomise, token_ids
from torch import Tensor

from gatelab.interop.convert import convert
from gatelab.interop.loading import load, open_checkpoint
from gatelab.model.cache import KVCache
from gatelab.model.decoder import Decoder
from gatelab.model.latent import LatentAttention
from gatelab.model.masks import PADDING

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": V, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 6,
    "intermediate_size": 56, "max_position_embeddings": 64, "kv_lora_rank": 12, "q_lora_rank": 11,
    "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 9, "first_k_dense_replace": 2,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 16.0, "beta_slow": 1.0,
}  # fmt: skip
DENSE: dict[str, dict[str, Any]] = {
    "plain": {"rope_parameters": PLAIN},
    "no query latent": {"rope_parameters": PLAIN, "q_lora_rank": None},
    "halves": {"rope_parameters": PLAIN, "rope_interleave": False},
    "tied head": {"rope_parameters": PLAIN, "tie_word_embeddings": True},
    "large values": {"rope_parameters": PLAIN, "v_head_dim": 20},
    "values as large as keys": {"rope_parameters": PLAIN, "v_head_dim": 18},
    "another epsilon": {"rope_parameters": PLAIN, "rms_norm_eps": 1e-2},
    "yarn": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "yarn with a ratio": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "yarn without mscale": {"rope_parameters": YARN},
}
EXPERTS = {
    "first_k_dense_replace": 1, "n_routed_experts": 5, "n_shared_experts": 2, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "rope_parameters": PLAIN,
}  # fmt: skip
TOLERANCE = 1e-10


class Wide:
    """torch, but that float32 is float64: transformers computes norms, rotations and softmax in float32 at most."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (transformers.models.deepseek_v3.modeling_deepseek_v3, transformers.modeling_rope_utils):
        monkeypatch.setattr(module, "torch", Wide())


def build(**changes: Any) -> Any:
    """A float64 model whose weights are all random."""
    config = transformers.DeepseekV3Config(
        **{**SIZES, **changes}, attn_implementation="eager", experts_implementation="eager"
    )
    model = transformers.DeepseekV3ForCausalLM(config).double().eval()
    randomise(model, seed=0)
    return model


def error(found: Tensor, expected: Tensor) -> float:
    assert found.dtype == expected.dtype == torch.float64 and expected.std() > 1
    return float((found - expected).detach().abs().max())


@pytest.mark.parametrize("kind", DENSE)
def test_theirs_to_ours_and_back(kind: str, tmp_path: Path) -> None:
    theirs = build(**DENSE[kind])
    theirs.save_pretrained(tmp_path / "theirs")
    expected = theirs(token_ids()).logits
    decoder = load(tmp_path / "theirs")
    assert isinstance(decoder.model.layers[0].self_attn, LatentAttention)
    assert error(decoder(token_ids()), expected) < TOLERANCE
    convert(tmp_path / "theirs", tmp_path / "ours", to="deepseek_v3")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(back) is transformers.DeepseekV3ForCausalLM and back.config.rope_interleave is True
    assert error(back(token_ids()).logits, expected) < TOLERANCE
    if DENSE[kind].get("rope_interleave", True):
        assert all(torch.equal(back.state_dict()[name], weight) for name, weight in theirs.state_dict().items())
    assert open_checkpoint(tmp_path / "ours").settings == decoder.settings


@pytest.mark.parametrize("kind", ["no query latent", "yarn"])
def test_gradients(kind: str, tmp_path: Path) -> None:
    """Of every parameter; those of rotated rows in their order."""
    theirs = build(**DENSE[kind])
    theirs.save_pretrained(tmp_path)
    decoder = load(tmp_path).train()
    found, expected = gradients(decoder, decoder(token_ids())), gradients(theirs, theirs(token_ids()).logits)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        is_turned = name.endswith(("q_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight"))
        if is_turned:
            size = 20 if "kv_a" in name else 18
            parts = gradient.unflatten(0, (-1, size))
            gradient = torch.cat((parts[:, :-8], parts[:, -8::2], parts[:, -7::2]), 1).flatten(0, 1)
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=TOLERANCE, msg=lambda m: f"{name}: {m}")  # noqa: B023


@torch.no_grad()
def test_experts_chosen_among_all(tmp_path: Path) -> None:
    theirs = build(**EXPERTS)
    generator = torch.Generator().manual_seed(9)
    for name, bias in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(0.3 * torch.randn(bias.shape, generator=generator))
    theirs.save_pretrained(tmp_path)
    decoder = load(tmp_path)
    assert [decoder.settings.mixture_on_layer(layer) is None for layer in range(2)] == [True, False]
    assert error(decoder(token_ids()), theirs(token_ids()).logits) < TOLERANCE


@torch.no_grad()
def test_left_padding_and_decoding(tmp_path: Path) -> None:
    theirs = build(**DENSE["yarn"])
    theirs.save_pretrained(tmp_path)
    ours, ids, lengths = load(tmp_path), token_ids(), torch.tensor([5, 17, 11])
    seen = torch.arange(17) >= 17 - lengths[:, None]
    cache = KVCache(num_layers=2)
    logits = ours(ids, torch.where(seen, 0, PADDING), cache)
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    output = theirs(ids, attention_mask=seen.long(), position_ids=positions, use_cache=True)
    assert error(logits[seen], output.logits[seen]) < TOLERANCE
    step = ours(ids[:, :1], cache=cache)
    seen = torch.cat((seen, torch.ones(3, 1, dtype=torch.bool)), 1)
    expected = theirs(ids[:, :1], attention_mask=seen.long(), position_ids=lengths[:, None], cache=output.cache).logits
    assert error(step, expected) < TOLERANCE


def test_a_decoder_of_ours_becomes_theirs(tmp_path: Path) -> None:
    """A trained run's own settings, written as DeepSeek-V3 from a folder of our Hugging Face form."""
    from gatelab.interop.huggingface import from_decoder

    build(**DENSE["plain"]).save_pretrained(tmp_path / "start")
    settings = open_checkpoint(tmp_path / "start").settings
    ours = Decoder(settings).double()
    randomise(ours, seed=4)
    from_decoder(ours).save_pretrained(tmp_path / "gatelab")
    convert(tmp_path / "gatelab", tmp_path / "theirs", to="deepseek_v3")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    assert error(theirs(token_ids()).logits, ours(token_ids())) < TOLERANCE

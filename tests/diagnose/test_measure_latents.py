"""Latent attention measured against its full maps: keys and values of different sizes, one shared rotated key."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_maps import causal, naive_map
from torch import Tensor

from gatelab.diagnose.measure import measure
from gatelab.diagnose.rank import effective_rank, stable_rank
from gatelab.gates.variants import find_variant
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.latent import LatentAttention
from gatelab.model.settings import LatentSettings, ModelSettings, RopeSettings

B, T, L, H, C, U, CV, RANK = 2, 13, 3, 5, 12, 8, 7, 11
YARN = {
    "kind": "yarn",
    "factor": 3.0,
    "original_context": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def make_decoder(gate: str, value_size: int = CV, **changes: Any) -> Decoder:
    latent = LatentSettings(
        query_rank=10, key_value_rank=RANK, unrotated_size=U, rotated_size=C - U, value_size=value_size
    )
    sizes = {
        "vocab_size": 29,
        "width": 24,
        "num_layers": L,
        "num_heads": H,
        "num_kv_heads": H,
        "head_size": C,
        "feedforward_width": 36,
        "max_context": 21,
        "init_std": 0.25,
        "qk_norm": False,
        "latent": latent,
        "gates": find_variant(gate).gates,
    }
    decoder = Decoder(ModelSettings(**{**sizes, **changes})).double()  # type: ignore[arg-type]
    initialize(decoder, seed=2)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)).double()
    return decoder


class Keeping:
    """Keeps what attention layers hand over."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}

    def record(self, layer: int, tensors: Any, scores: Any) -> None:
        self.layers[layer] = (dict(tensors), dict(scores))


def make_tokens() -> Tensor:
    return torch.randint(29, (B, T), generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def plain_pass(decoder: Decoder) -> dict[int, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    kept = Keeping()
    for layer in decoder.model.layers:
        layer.self_attn.recorder = kept
    decoder(make_tokens())
    for layer in decoder.model.layers:
        layer.self_attn.recorder = None
    return kept.layers


@pytest.mark.parametrize("value_size", [CV, 15])
@pytest.mark.parametrize("rope", [RopeSettings(), RopeSettings.parse({"scaling": YARN})], ids=["plain", "yarn"])
def test_figures_equal_those_of_full_maps(rope: RopeSettings, value_size: int) -> None:
    decoder = make_decoder("sdpa_and_value", value_size, rope=rope)
    kept = plain_pass(decoder)
    found = measure(decoder, make_tokens(), full=True)
    assert len(found.layers) == L
    for number, layer in enumerate(found.layers):
        tensors, scores = kept[number]
        assert tensors["query"].shape[2:] == tensors["key"].shape[2:] == (H, C)
        assert tensors["value"].shape[2:] == tensors["output"].shape[2:] == (H, value_size)
        weights = naive_map(tensors["query"], tensors["key"], C**-0.5, causal(T, T))
        torch.testing.assert_close(torch.einsum("bhts,bshv->bthv", weights, tensors["value"]), tensors["output"])
        first = weights[..., 0].mean((0, 2)).tolist()
        assert layer.by_head("first_token_attention") == pytest.approx(first, abs=1e-6)
        magnitude = tensors["gated_output"].abs().mean((0, 1, 3)).tolist()
        assert layer.by_head("gated_output_magnitude") == pytest.approx(magnitude, rel=1e-6)
        assert layer.gates["sdpa_output"].whole.mean == pytest.approx(scores["sdpa_output"].mean().item(), abs=1e-6)


def test_the_scale_of_yarn_is_in_the_queries() -> None:
    yarn, plain = (
        plain_pass(make_decoder("none", rope=RopeSettings.parse({"scaling": {**YARN, **changes}})))[0][0]["query"]
        for changes in ({}, {"mscale": None, "mscale_all_dim": None, "attention_factor": 1.0})
    )
    torch.testing.assert_close(yarn, plain * (0.1 * math.log(3.0) + 1) ** 2, rtol=1e-12, atol=0)


def test_ranks_are_those_of_what_a_head_writes() -> None:
    """W_O W_UV diag(w) W_DKV of each head, as one matrix of width by width."""
    decoder = make_decoder("sdpa_headwise")
    found = measure(decoder, make_tokens(), full=True)
    for number, layer in enumerate(found.layers):
        attention = decoder.model.layers[number].self_attn
        assert isinstance(attention, LatentAttention)
        down = attention.kv_a_layernorm.weight[:, None] * attention.kv_a_proj_with_mqa.weight[:RANK]
        matrices = []
        for head in range(H):
            rows = attention.kv_b_proj.weight[head * (U + CV) + U : (head + 1) * (U + CV)]
            matrices.append(attention.o_proj.weight[:, head * CV : (head + 1) * CV] @ rows @ down)
        values = torch.linalg.svdvals(torch.stack(matrices).detach())[:, :CV]
        assert layer.by_head("vo_effective_rank") == pytest.approx(effective_rank(values).tolist(), rel=1e-6)
        assert layer.by_head("vo_stable_rank") == pytest.approx(stable_rank(values).tolist(), rel=1e-6)

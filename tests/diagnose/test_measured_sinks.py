"""A decoder with a key that no token has, measured: its share stands apart, and token 0 stays token 0."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from attention_maps import naive_map, naive_visible
from torch import Tensor

from gatelab.diagnose.calls import Visibility
from gatelab.diagnose.measure import attach_decoder, measure
from gatelab.diagnose.recorder import Recorder
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.settings import LayerSettings, ModelSettings, SinkSettings

B, T, H, K, C = 3, 11, 6, 2, 8
KINDS = ("learned_logit", "off_by_one", "learned_key_value")
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7, [2] * 11, [0] * 6 + [1] * 5])
REAL = torch.arange(T) >= torch.tensor([[0], [3], [1]])


def make_decoder(kind: str) -> Decoder:
    settings = ModelSettings(
        vocab_size=29,
        width=40,
        num_layers=2,
        num_heads=H,
        num_kv_heads=K,
        head_size=C,
        feedforward_width=24,
        max_context=21,
        init_std=0.25,
        sink=SinkSettings.parse({"kind": kind}),
        layers=(LayerSettings(window=5), LayerSettings()),
    )
    decoder = Decoder(settings).double()
    initialize(decoder, 2)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if ".sink." in name:
                parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)).double()
    return decoder


def make_tokens() -> Tensor:
    return torch.randint(29, (B, T), generator=torch.Generator().manual_seed(4))


class Keeping:
    """Keeps the queries and keys that attention layers hand over."""

    def __init__(self) -> None:
        self.layers: dict[int, Mapping[str, Tensor]] = {}

    def record(self, layer: int, tensors: Mapping[str, Tensor], scores: Mapping[str, Tensor]) -> None:
        self.layers[layer] = tensors


def sink_logits(decoder: Decoder, layer: int, query: Tensor) -> Tensor:
    """(B H T), one by one."""
    start = f"model.layers.{layer}.self_attn.sink."
    weights = {name.removeprefix(start): one for name, one in decoder.named_parameters() if name.startswith(start)}
    logits = torch.zeros(B, H, T, dtype=torch.float64)
    for b, h, t in torch.cartesian_prod(*map(torch.arange, logits.shape)).tolist():
        if "key" in weights:
            logits[b, h, t] = torch.dot(query[b, t, h], weights["key"][h // (H // K)]) / math.sqrt(C)
        elif "logits" in weights:
            logits[b, h, t] = weights["logits"][h]
    return logits


@pytest.mark.parametrize("hidden", ["nothing", "padding", "documents"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_shares_of_the_sink_and_of_token_0_are_those_of_the_map(kind: str, hidden: str) -> None:
    decoder, tokens, kept = make_decoder(kind), make_tokens(), Keeping()
    real, documents = REAL if hidden == "padding" else None, DOCUMENTS if hidden == "documents" else None
    for layer in decoder.model.layers:
        layer.self_attn.recorder = kept
    numbers = documents if real is None else torch.where(real, 0, -1)
    decoder(tokens, numbers)
    found = measure(decoder, tokens, padding_mask=real, documents=documents, full=True)
    for number, layer in enumerate(found.layers):
        query, key = (kept.layers[number][name].double() for name in ("query", "key"))
        sight = Visibility(T, T, window=5 if number == 0 else None, real=real, documents=documents)
        visible, logits = naive_visible(sight, B), sink_logits(decoder, number, query)
        weights = naive_map(query, key, C**-0.5, visible, learned_sinks=logits)
        counted = (torch.ones(B, T).bool() if real is None else real) & visible.any(-1)
        sees = counted & visible[..., 0]
        for metric, mass, queries in (
            ("first_token_attention", weights[..., 0], sees),
            ("learned_sink_attention", 1 - weights.sum(-1), counted),
        ):
            expected = [mass[:, h][queries].mean().item() for h in range(H)]
            assert layer.by_head(metric) == pytest.approx(expected, abs=1e-10)
            assert min(expected) > 1e-4
        even = 1 / visible.sum(-1).double()
        assert layer.floor("first_token_attention") == pytest.approx(even[sees].mean().item(), abs=1e-12)
        shares = torch.cat((weights, 1 - weights.sum(-1, keepdim=True)), -1)
        entropy = torch.special.entr(shares).sum(-1)
        expected = [entropy[:, h][counted].mean().item() for h in range(H)]
        assert layer.by_head("attention_entropy") == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_an_observed_decoder_computes_the_same(kind: str, dtype: torch.dtype) -> None:
    decoder, tokens = make_decoder(kind).to(dtype), make_tokens()

    def logits(context: AbstractContextManager[object], documents: Tensor | None) -> Tensor:
        with context:
            return decoder(tokens, documents)

    for documents in (None, DOCUMENTS):
        recorder = Recorder()
        recorder.start(tokens, documents=documents)
        observed = logits(attach_decoder(decoder, recorder), documents)
        tolerance = 1e-11 if dtype == torch.float64 else 2e-4
        torch.testing.assert_close(observed, logits(nullcontext(), documents), rtol=0, atol=tolerance)

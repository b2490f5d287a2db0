"""A key that no token has: its call against loops and other formulas, its start, its cost, and what it leaves alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_decoders import SINKS, B, T, tiny_decoder, tiny_settings, token_ids
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gatelab.gates.spec import AttentionShape
from gatelab.model.accounting import count_parameters, flops_per_token_forward
from gatelab.model.attention import fused_attention
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.masks import PADDING, document_mask, suffix_mask
from gatelab.model.settings import ModelSettings, SinkSettings
from gatelab.model.sink import Sink

H, K, C = 6, 2, 8
KINDS = ("learned_logit", "off_by_one", "learned_key_value")
GOLDEN = Path(__file__).parent.parent / "golden" / "state_dict_keys.json"
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 13, [PADDING] * 6 + [3] * 11, [2] * 15 + [PADDING] * 2])
MASKS: dict[str, tuple[int, Tensor | None, bool]] = {
    "causal": (T, None, True),
    "full": (T, None, False),
    "documents": (T, document_mask(DOCUMENTS, T, causal=True), True),
    "documents, full": (T, document_mask(DOCUMENTS, T, causal=False), False),
    "window": (T, suffix_mask(T, T, torch.device("cpu"), window=3), True),
    "earlier keys": (5, suffix_mask(5, T, torch.device("cpu")), True),
    "one query": (1, suffix_mask(1, T, torch.device("cpu"), window=7), True),
}


def make_sink(kind: str, dtype: torch.dtype = torch.float64) -> Sink:
    sink = Sink(SinkSettings.parse({"kind": kind}), AttentionShape(width=40, num_heads=H, num_kv_heads=K, head_size=C))
    generator = torch.Generator().manual_seed(5)
    for parameter in sink.parameters():
        parameter.data = 1.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return sink.to(dtype)


def make_tensors(num_queries: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(6)
    shapes = ((B, num_queries, H, C), (B, T, K, C), (B, T, K, C))
    tensors = [1.3 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def attention_by_loops(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, kind: str, sink: Sink
) -> Tensor:
    """o = (sum_j exp(q k_j / sqrt(C)) v_j + exp(s) v') / (sum_j exp(q k_j / sqrt(C)) + exp(s)), head by head."""
    output = torch.zeros_like(query)
    for b, t, h in torch.cartesian_prod(*map(torch.arange, query.shape[:3])).tolist():
        q, group = query[b, t, h], h // (H // K)
        numerator, denominator = torch.zeros_like(q), torch.zeros_like(q[0])
        for s in range(T):
            is_seen = mask[min(b, len(mask) - 1), 0, t, s] if mask is not None else s <= t or not causal
            if is_seen:
                weight = torch.exp(torch.dot(q, key[b, s, group]) / math.sqrt(C))
                numerator, denominator = numerator + weight * value[b, s, group], denominator + weight
        if kind == "off_by_one":
            denominator = denominator + 1
        elif kind == "learned_logit":
            assert sink.logits is not None
            denominator = denominator + torch.exp(sink.logits[h])
        else:
            assert sink.key is not None and sink.value is not None
            weight = torch.exp(torch.dot(q, sink.key[group]) / math.sqrt(C))
            numerator, denominator = numerator + weight * sink.value[group], denominator + weight
        output[b, t, h] = numerator / denominator
    return output


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MASKS)
def test_outputs_and_gradients_equal_loops(name: str, kind: str) -> None:
    num_queries, mask, causal = MASKS[name]
    tensors, sink = make_tensors(num_queries), make_sink(kind)
    wanted = [*tensors, *sink.parameters()]
    output = fused_attention(*tensors, mask, causal, sink)
    expected = attention_by_loops(*tensors, mask, causal, kind, sink)
    assert output.shape == (B, num_queries, H, C)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    ours, theirs = (torch.autograd.grad(one, wanted, upstream) for one in (output, expected))
    for actual, wished in zip(ours, theirs, strict=True):
        assert wished.abs().max() > 1e-3
        torch.testing.assert_close(actual, wished, rtol=0, atol=1e-11)
    assert (output - fused_attention(*tensors, mask, causal)).abs().max() > 0.03, "the sink takes its share"


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_near(kind: str) -> None:
    sink = make_sink(kind)
    exact = fused_attention(*make_tensors(T), None, True, sink)
    output = fused_attention(*make_tensors(T, torch.bfloat16), None, True, sink.float())
    assert output.dtype == torch.bfloat16
    assert (output.double() - exact).abs().mean() < 0.02 * exact.abs().mean()


@pytest.mark.parametrize("logit", [-60.0, 60.0])
def test_logits_far_from_those_of_the_keys_are_exact(logit: float) -> None:
    """A sink that takes nothing is no sink, and one that takes all leaves nothing."""
    sink = make_sink("learned_logit")
    assert sink.logits is not None
    sink.logits.data.fill_(logit)
    tensors = make_tensors(T)
    expected = fused_attention(*tensors, None, True) * (logit < 0)
    torch.testing.assert_close(fused_attention(*tensors, None, True, sink), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_for_measuring_are_those_of_the_softmax(kind: str) -> None:
    sink, (query, key, value) = make_sink(kind), make_tensors(T)
    logits = sink.logits_for(query, C**-0.5).expand(B, H, T)
    keys, values = (tensor.repeat_interleave(H // K, 2) for tensor in (key, value))
    token_logits = torch.einsum("bthc,bshc->bhts", query, keys) / math.sqrt(C)
    weights = torch.cat((logits[..., None], token_logits), -1).softmax(-1)
    first = torch.zeros(K, C, dtype=torch.float64) if sink.value is None else sink.value
    expected = torch.einsum("bhts,bshc->bthc", weights[..., 1:], values)
    expected = expected + weights[..., 0].transpose(1, 2)[..., None] * first.repeat_interleave(H // K, 0)
    torch.testing.assert_close(fused_attention(query, key, value, None, False, sink), expected, rtol=0, atol=1e-12)


def test_a_start_that_adds_nothing() -> None:
    decoders = {}
    for kind in KINDS:
        decoders[kind] = Decoder(tiny_settings(sink=SinkSettings.parse({"kind": kind}))).double()
        initialize(decoders[kind], 0)
    plain = Decoder(tiny_settings()).double()
    initialize(plain, 0)
    for kind, decoder in decoders.items():
        state = decoder.state_dict()
        assert all(torch.equal(weight, state[name]) for name, weight in plain.state_dict().items())
        for name in state.keys() - plain.state_dict().keys():
            assert ".self_attn.sink." in name
            if name.endswith(".key"):
                assert state[name].std().item() == pytest.approx(0.2, rel=0.5), kind
            else:
                assert (state[name] == 0).all()
    ids = token_ids()
    assert torch.equal(decoders["learned_logit"](ids), decoders["learned_logit"](ids))
    torch.testing.assert_close(decoders["learned_logit"](ids), decoders["off_by_one"](ids), rtol=0, atol=1e-12)
    keys = {name for name, _ in decoders["learned_key_value"].named_parameters() if name.endswith("sink.key")}
    assert len({decoders["learned_key_value"].get_parameter(key).data[0, 0].item() for key in keys}) == 2


@pytest.mark.parametrize(("kind", "added"), [("learned_logit", H), ("off_by_one", 0), ("learned_key_value", 2 * K * C)])
def test_what_a_sink_costs(kind: str, added: int) -> None:
    settings = tiny_settings(sink=SinkSettings.parse({"kind": kind}), causal=False)
    plain = tiny_settings(causal=False)
    counts, before = count_parameters(settings), count_parameters(plain)
    assert counts.total - before.total == counts.active - before.active == added * settings.num_layers
    assert counts.gates == 0
    more = flops_per_token_forward(settings, T) - flops_per_token_forward(plain, T)
    assert more == (4 * H * C * settings.num_layers if kind == "learned_key_value" else 0)


def test_operations_with_a_learned_key_equal_pytorchs_counter() -> None:
    settings = tiny_settings(sink=SinkSettings(kind="learned_key_value"), causal=False)
    decoder = Decoder(settings).double()
    initialize(decoder, 0)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        decoder(token_ids())
    assert counter.get_total_flops() == B * T * flops_per_token_forward(settings, context=T)


@pytest.mark.parametrize("name", SINKS)
def test_names_and_shapes_are_the_stored_ones(name: str) -> None:
    found = {
        key: list(weight.shape)
        for key, weight in Decoder(SINKS[name]).state_dict().items()
        if ".0.self_attn." in key and "proj" not in key
    }
    assert found == json.loads(GOLDEN.read_text())[f"sink: {name}"]


@torch.no_grad()
def test_a_number_of_heads_of_its_own() -> None:
    """A learned logit is for each of the layer's own heads."""
    settings = tiny_settings(sink=SinkSettings(kind="learned_logit"), layers=({"num_heads": 4}, {}))
    decoder = tiny_decoder(ModelSettings.parse(settings.to_mapping()))
    assert [tuple(layer.self_attn.sink.logits.shape) for layer in decoder.model.layers] == [(4,), (6,)]
    assert decoder(token_ids()).isfinite().all()


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind cannot be 'learned_logits'; did you mean 'learned_logit'"):
        ModelSettings.parse({**tiny_settings().to_mapping(), "sink": {"kind": "learned_logits"}})


@pytest.mark.compile
@torch.no_grad()
@pytest.mark.parametrize("name", SINKS)
def test_sinks_keep_a_decoder_in_one_graph(name: str) -> None:
    decoder, ids = tiny_decoder(SINKS[name], torch.float32), token_ids()
    assert torch.equal(torch.compile(decoder, backend="eager", fullgraph=True)(ids), decoder(ids))

"""Window caches on GateLab decoders, against eviction token by token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from streaming_by_loops import B, T, V, stream_by_loops, stream_decoder, stream_settings, token_ids
from torch import Tensor

from gatelab.gates.variants import find_variant
from gatelab.longcontext.streaming.cache import LayerStream, Logits, WindowCache
from gatelab.longcontext.streaming.models import require_streamable, streaming
from gatelab.longcontext.streaming.stream import stream_losses
from gatelab.model.attention import fused_attention
from gatelab.model.decoder import Decoder
from gatelab.model.settings import LatentSettings, LayerSettings, MixtureSettings, RopeSettings, SinkSettings

WINDOW = 5
LOCAL_AND_GLOBAL = {
    "layers": (LayerSettings(window=7, rope=RopeSettings(base=30.0)), LayerSettings(rope=RopeSettings(base=700.0)))
}
SHAPES = {
    "elementwise": stream_settings("sdpa_elementwise"),
    "headwise value gate": stream_settings("value_headwise"),
    "key gate": stream_settings("key_elementwise"),
    "local and global": stream_settings("sdpa_headwise", **LOCAL_AND_GLOBAL),
    "local window below the cache's": stream_settings(layers=(LayerSettings(window=6), LayerSettings(window=50))),
    "partial rotary": stream_settings(rope=RopeSettings(base=50.0, fraction=0.5)),
    "a layer without rotation": stream_settings(layers=(LayerSettings(rotary=False), LayerSettings())),
    "learned logit": stream_settings(sink=SinkSettings(kind="learned_logit")),
    "off by one": stream_settings(sink=SinkSettings(kind="off_by_one")),
    "learned key and value": stream_settings(sink=SinkSettings(kind="learned_key_value")),
    "experts": stream_settings(mixture=MixtureSettings(num_experts=5, experts_per_token=2, expert_width=24)),
}


@torch.no_grad()
def read_in_chunks(decoder: Decoder, ids: Tensor, cache: WindowCache, sizes: Sequence[int]) -> Tensor:
    with streaming(decoder, cache) as read:
        return torch.cat([read(piece) for piece in ids.split(list(sizes), dim=1)], dim=1)


@pytest.mark.parametrize("kept", [0, 1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_eviction_token_by_token(shape: str, kept: int) -> None:
    decoder, ids = stream_decoder(SHAPES[shape]), token_ids()
    expected = stream_by_loops(decoder, ids, kept, WINDOW)
    assert expected.shape == (B, T, V)
    for sizes in ([1] * T, [3] * 7 + [2], [13, 10], [T]):
        found = read_in_chunks(decoder, ids, WindowCache(kept, WINDOW), sizes)
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("window", [1, 2, T - 1, T, T + 5])
def test_any_window_equals_eviction_token_by_token(window: int) -> None:
    decoder, ids = stream_decoder(stream_settings("sdpa_elementwise")), token_ids()
    for kept in (0, 2):
        expected = stream_by_loops(decoder, ids, kept, window)
        found = read_in_chunks(decoder, ids, WindowCache(kept, window), [7, 7, 9])
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cache_that_holds_the_text_is_the_plain_decoder(shape: str) -> None:
    decoder, ids = stream_decoder(SHAPES[shape]), token_ids()
    with torch.no_grad():
        expected = decoder(ids)
    found = read_in_chunks(decoder, ids, WindowCache(0, T), [9, 14])
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


def test_kept_tokens_are_read_forever_and_others_are_not() -> None:
    """In one layer, where nothing of a token can live on in later ones."""
    decoder, ids = stream_decoder(stream_settings(num_layers=1)), token_ids()
    changed = ids.clone()
    changed[:, 1] = (ids[:, 1] + 1) % V
    for kept, is_remembered in ((0, False), (1, False), (2, True), (4, True)):
        cache = WindowCache(kept, WINDOW)
        one, other = (read_in_chunks(decoder, text, cache, [4, 9, 10])[:, -3:] for text in (ids, changed))
        assert bool((one != other).any()) == is_remembered


def test_no_more_is_remembered_than_the_next_token_sees() -> None:
    stream, rows = LayerStream(WindowCache(2, WINDOW)), torch.zeros(B, 9, 2, 8)
    for _ in range(3):
        stream.attend(rows, rows, rows, lambda x, positions: x, Logits(1.0))
    assert stream.seen == 27
    assert stream.num_remembered == 2 + WINDOW - 1


def test_a_text_longer_than_the_models_context_is_read() -> None:
    decoder, ids = stream_decoder(stream_settings(max_context=12)), token_ids(40)
    found = read_in_chunks(decoder, ids, WindowCache(2, 10), [11, 11, 11, 7])
    torch.testing.assert_close(found, stream_by_loops(decoder, ids, 2, 10), atol=1e-10, rtol=0)


def test_losses_are_those_of_the_logits_and_do_not_depend_on_the_chunk() -> None:
    decoder, ids = stream_decoder(stream_settings("sdpa_headwise")), token_ids()
    logits = stream_by_loops(decoder, ids, 1, WINDOW)
    expected = torch.zeros(B, T - 1, dtype=torch.float64)
    for row in range(B):
        for place in range(T - 1):
            expected[row, place] = -logits[row, place].softmax(-1)[ids[row, place + 1]].log()
    for chunk in (1, 4, 64):
        found = stream_losses(decoder, ids, WindowCache(1, WINDOW), chunk)
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


def test_the_decoder_is_as_before_whatever_happened() -> None:
    decoder = stream_decoder(stream_settings())
    with pytest.raises(RuntimeError, match="stop"), streaming(decoder, WindowCache(0, WINDOW)):
        assert all(layer.self_attn.kernel is not fused_attention for layer in decoder.model.layers)
        raise RuntimeError("stop")
    assert all(layer.self_attn.kernel is fused_attention for layer in decoder.model.layers)


def test_caches_without_a_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match="kept=-1 is below 0; keep 0 initial tokens or more"):
        WindowCache(-1, 5)
    with pytest.raises(ValueError, match="window=0 holds no token; take at least 1"):
        WindowCache(4, 0)


LATENT = LatentSettings(key_value_rank=10, unrotated_size=8, rotated_size=4, value_size=7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal": False}, "causal=False lets tokens see later ones; only a causal decoder can read a stream"),
        ({"gates": find_variant("key_after_rope").gates}, "a key gate has placement=after_rope, so its keys can't be"),
        (
            {"num_kv_heads": 6, "head_size": 12, "qk_norm": False, "latent": LATENT},
            "latent attention rotates one key for all heads ahead of its kernel, so its keys can't be turned to new",
        ),
        (
            {"layers": (LayerSettings(), LayerSettings(window=4))},
            "kept=4 tokens fill the window of 4 tokens of a layer",
        ),
    ],
)
def test_decoders_that_cannot_be_streamed_are_refused(changes: dict[str, object], message: str) -> None:
    decoder = stream_decoder(stream_settings(**changes))
    with pytest.raises(ValueError, match=message):
        require_streamable(decoder, [WindowCache(4, WINDOW)], token_ids())
    assert all(layer.self_attn.kernel is fused_attention for layer in decoder.model.layers)

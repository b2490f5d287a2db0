"""Decoding with a cache equals reading everything at once, padded rows included."""

from __future__ import annotations

import pytest
import torch
from tiny_decoders import ARCHITECTURES, FAMILIES, MIXTURE, SINKS, tiny_decoder, tiny_settings, token_ids
from torch import Tensor

from gatelab.gates import reference
from gatelab.model.attention import fused_attention
from gatelab.model.cache import KVCache
from gatelab.model.decoder import Decoder
from gatelab.model.masks import PADDING

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def decode_greedily(
    decoder: Decoder, ids: Tensor, num_tokens: int, documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The chosen tokens (B N) and the logits that chose them (B N V)."""
    cache = KVCache(decoder.settings.num_layers)
    chosen, seen = [], []
    logits = decoder(ids, documents, cache)[:, -1:]
    for _ in range(num_tokens):
        seen.append(logits)
        chosen.append(logits.argmax(-1))
        logits = decoder(chosen[-1], cache=cache)
    return torch.cat(chosen, 1), torch.cat(seen, 1)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_four_then_three_then_one_equal_one_pass(name: str, dtype: torch.dtype) -> None:
    settings = ARCHITECTURES[name]
    decoder = tiny_decoder(settings, dtype)
    ids = token_ids(num_tokens=8)
    cache = KVCache(settings.num_layers)
    pieces = [decoder(piece, cache=cache) for piece in ids.split([4, 3, 1], dim=1)]
    assert relative_error(torch.cat(pieces, 1), decoder(ids)) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", ["dense", "mixture", "value gate", "partial rotary", *FAMILIES, *SINKS])
@torch.no_grad()
def test_packed_documents_in_pieces_equal_one_pass(name: str, dtype: torch.dtype) -> None:
    """The pieces cut through documents, and rows have their own borders and padding."""
    decoder = tiny_decoder(ARCHITECTURES[name], dtype)
    documents = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2], [-1, -1, 0, 0, 0, 0, 0, 1], [7, 7, 7, 7, 7, 9, 9, 9]])
    ids = token_ids(num_tokens=8)
    cache = KVCache(decoder.settings.num_layers)
    pieces = [
        decoder(piece, numbers, cache)
        for piece, numbers in zip(ids.split([4, 3, 1], dim=1), documents.split([4, 3, 1], dim=1), strict=True)
    ]
    counted = documents != PADDING
    assert relative_error(torch.cat(pieces, 1)[counted], decoder(ids, documents)[counted]) < TOLERANCES[dtype]


@pytest.mark.parametrize(
    "name", ["dense", "mixture", "gate from the output", "two gates", "sandwich norm", *FAMILIES, *SINKS]
)
@torch.no_grad()
def test_left_padded_rows_decode_as_if_alone(name: str) -> None:
    decoder = tiny_decoder(ARCHITECTURES[name])
    ids = token_ids(num_tokens=9)
    lengths = (3, 9, 5)
    documents = torch.tensor([[PADDING] * (9 - length) + [0] * length for length in lengths])
    tokens, logits = decode_greedily(decoder, ids, 40, documents)
    for row, length in enumerate(lengths):
        solo_tokens, solo_logits = decode_greedily(decoder, ids[row : row + 1, 9 - length :], 40)
        assert torch.equal(tokens[row], solo_tokens[0])
        torch.testing.assert_close(logits[row], solo_logits[0], rtol=0, atol=1e-11)
    assert len(tokens.unique()) > 10, "the rows say something"


@torch.no_grad()
def test_decoding_goes_on_in_the_last_document_of_each_row() -> None:
    decoder = tiny_decoder(tiny_settings("sdpa_elementwise"))
    ids = token_ids(num_rows=2, num_tokens=9)
    documents = torch.tensor([[-1, -1, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 3, 3]])
    tokens, logits = decode_greedily(decoder, ids, 35, documents)
    for row, length in enumerate((4, 2)):
        solo_tokens, solo_logits = decode_greedily(decoder, ids[row : row + 1, -length:], 35)
        assert torch.equal(tokens[row], solo_tokens[0])
        torch.testing.assert_close(logits[row], solo_logits[0], rtol=0, atol=1e-11)


@torch.no_grad()
def test_what_came_before_the_first_numbers_is_document_0() -> None:
    decoder = tiny_decoder(tiny_settings())
    ids = token_ids(num_tokens=8)
    cache = KVCache(2)
    decoder(ids[:, :4], cache=cache)
    numbers = torch.tensor([[0, 0, 1, 1]]).expand(3, 4)
    logits = decoder(ids[:, 4:], numbers, cache)
    expected = decoder(ids, torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1]]).expand(3, 8))[:, 4:]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_padding_at_the_end_must_say_what_follows() -> None:
    decoder = tiny_decoder(tiny_settings(mixture=MIXTURE))
    cache = KVCache(2)
    decoder(token_ids(num_tokens=4), torch.tensor([[0, 0, 0, PADDING]]).expand(3, 4), cache)
    with pytest.raises(ValueError, match=r"^a row of the cache ends in padding: give the document numbers of the new"):
        decoder(token_ids(num_tokens=1), cache=cache)
    assert cache.length == 4 and cache.layers[0].keys is not None and cache.layers[0].keys.shape[1] == 4
    decoder(token_ids(num_tokens=1), torch.zeros(3, 1, dtype=torch.int64), cache)
    assert cache.length == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_long_row_of_padding_leaves_no_trace(dtype: torch.dtype) -> None:
    """Attention kernels work block by block; here whole blocks of keys are hidden."""
    decoder = tiny_decoder(tiny_settings(max_context=700, init_std=0.05), dtype)
    ids = token_ids(num_rows=1, num_tokens=640)
    documents = torch.tensor([[PADDING] * 600 + [0] * 40])
    padded, solo = decoder(ids, documents)[:, 600:], decoder(ids[:, 600:])
    assert relative_error(padded, solo) < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("num_kv_heads", [6, 2, 1])
@pytest.mark.parametrize("masked", [True, False])
def test_a_single_query_by_loops(num_kv_heads: int, masked: bool) -> None:
    query, key, value = single_query(num_kv_heads, torch.float64)
    visible = torch.arange(17) >= torch.tensor([0, 5, 16])[:, None]
    output = fused_attention(query, key, value, visible[:, None, None] if masked else None, causal=False)
    for row in range(3):
        for head in range(6):
            kv_head = head // (6 // num_kv_heads)
            first = int(visible[row].int().argmax()) if masked else 0
            keys, values = (list(tensor[row, first:, kv_head]) for tensor in (key, value))
            expected = reference.attend(query[row, 0, head], keys, values)
            torch.testing.assert_close(output[row, 0, head], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_kv_heads", [6, 2, 1])
def test_a_single_bfloat16_query_is_computed_in_float32_and_rounded_once(num_kv_heads: int) -> None:
    query, key, value = single_query(num_kv_heads, torch.bfloat16)
    exact = fused_attention(query.double(), key.double(), value.double(), None, causal=False)
    assert torch.equal(fused_attention(query, key, value, None, causal=False), exact.bfloat16())


def single_query(num_kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A query of 6 heads and 17 keys with their values, in 3 rows, of 8 channels."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 1, 6, 8, generator=generator).to(dtype)
    key, value = torch.randn(2, 3, 17, num_kv_heads, 8, generator=generator).to(dtype)
    return query, key, value

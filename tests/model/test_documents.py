"""Packed documents: what plain packing lets through, and what masked packing keeps apart."""

from __future__ import annotations

import pytest
import torch
from tiny_decoders import ARCHITECTURES, V, tiny_decoder, tiny_settings, token_ids
from torch import Tensor

from gatelab.model.masks import PADDING
from gatelab.model.settings import ModelSettings

A, B = 7, 10  # lengths of the two documents
DENSE = [name for name, settings in ARCHITECTURES.items() if settings.mixture is None]
EXPERTS = [name for name in ARCHITECTURES if name not in DENSE]


def documents_of(*lengths: int) -> Tensor:
    """Document numbers of one packed row, for three rows."""
    numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor([numbers]).expand(3, -1)


@torch.no_grad()
def move_of_second_document(
    settings: ModelSettings, dtype: torch.dtype, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Logits of document B beside one document A and beside another."""
    decoder = tiny_decoder(settings, dtype)
    ids = token_ids(num_tokens=A + B)
    changed = ids.clone()
    changed[:, :A] = (ids[:, :A] + 1 + token_ids(num_tokens=A, seed=8) % (V - 1)) % V
    assert (changed[:, :A] != ids[:, :A]).all()
    return decoder(ids, documents)[:, A:], decoder(changed, documents)[:, A:]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_plain_packing_lets_one_document_see_the_other(name: str) -> None:
    before, after = move_of_second_document(ARCHITECTURES[name], torch.float64, None)
    assert ((before - after).abs().amax(-1) > 1e-4).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DENSE)
def test_masked_packing_keeps_documents_apart_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    before, after = move_of_second_document(ARCHITECTURES[name], dtype, documents_of(A, B))
    assert torch.equal(before, after)


@pytest.mark.parametrize("name", EXPERTS)
def test_masked_packing_keeps_documents_apart_with_experts(name: str) -> None:
    """Up to rounding: the group of rows that an expert multiplies at once holds tokens of both documents."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        before, after = move_of_second_document(ARCHITECTURES[name], dtype, documents_of(A, B))
        assert ((before - after).abs().max() / before.abs().max()).item() < tolerance


def test_masked_packing_without_causality() -> None:
    before, after = move_of_second_document(tiny_settings(causal=False), torch.float64, documents_of(A, B))
    assert torch.equal(before, after)


@pytest.mark.parametrize("name", [*ARCHITECTURES, "full attention"])
@torch.no_grad()
def test_each_packed_document_equals_its_solo_run(name: str) -> None:
    """Positions start again with each document, and padding between and after them changes nothing."""
    decoder = tiny_decoder(ARCHITECTURES.get(name, tiny_settings(causal=False)))
    ids = token_ids(num_rows=1, num_tokens=A + 2 + B + 3)
    documents = torch.tensor([[4] * A + [PADDING] * 2 + [5] * B + [PADDING] * 3])
    packed = decoder(ids, documents)
    for part in (slice(0, A), slice(A + 2, A + 2 + B)):
        torch.testing.assert_close(packed[:, part], decoder(ids[:, part]), rtol=0, atol=1e-12)


@torch.no_grad()
def test_one_document_is_the_plain_causal_pass() -> None:
    decoder = tiny_decoder(tiny_settings("sdpa_elementwise"))
    ids = token_ids()
    torch.testing.assert_close(decoder(ids, torch.zeros_like(ids)), decoder(ids), rtol=0, atol=1e-12)

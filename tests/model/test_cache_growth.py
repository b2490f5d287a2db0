"""A cache that takes memory once, or doubles it, gives the bits of one that concatenates."""

from __future__ import annotations

import pytest
import torch
from tiny_decoders import ARCHITECTURES, tiny_decoder, tiny_settings, token_ids
from torch import Tensor

from gatelab.model.attention import LayerCache
from gatelab.model.cache import GrowingTensor, KVCache, LayerKeysValues

CAPACITIES = [0, 3, 9, 40]


class ConcatenatingLayer:
    """The plain way to remember."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat((self.keys, keys), dim=1), torch.cat((self.values, values), dim=1)
        self.keys, self.values = keys, values
        return keys, values


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_growing_equals_concatenating(capacity: int) -> None:
    growing = GrowingTensor(capacity)
    assert growing.filled is None
    pieces = [torch.randn(3, num_tokens, 2, 8) for num_tokens in (4, 1, 1, 7, 1, 2)]
    views = []
    for count, piece in enumerate(pieces, start=1):
        views.append(growing.extend(piece))
        assert torch.equal(views[-1], torch.cat(pieces[:count], dim=1))
    assert growing.filled is not None and torch.equal(growing.filled, torch.cat(pieces, dim=1))
    for count, view in enumerate(views, start=1):
        assert torch.equal(view, torch.cat(pieces[:count], dim=1)), "what was handed out stays as it was"


def test_memory_is_taken_once_or_doubled() -> None:
    places = {GrowingTensor: [], KVCache: []}
    roomy, doubling = GrowingTensor(capacity=17), GrowingTensor()
    for _ in range(17):
        places[GrowingTensor].append(roomy.extend(torch.randn(3, 1, 2)).data_ptr())
        places[KVCache].append(doubling.extend(torch.randn(3, 1, 2)).data_ptr())
    assert len(set(places[GrowingTensor])) == 1
    assert sum(old != new for old, new in zip(places[KVCache], places[KVCache][1:], strict=False)) == 5  # 1 to 32


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("name", ["dense", "mixture", "value gate", "gate from the output", "afmoe", "learned logit"])
@torch.no_grad()
def test_logits_have_the_bits_of_a_concatenating_cache(name: str, capacity: int) -> None:
    decoder = tiny_decoder(ARCHITECTURES[name], torch.float32)
    ids = token_ids(num_tokens=12)
    for documents in (None, torch.tensor([[-1] * 3 + [0] * 9, [0] * 12, [-1] + [4] * 5 + [5] * 6])):
        cache, plain = (KVCache(decoder.settings.num_layers, capacity=size) for size in (capacity, 0))
        plain.layers = [ConcatenatingLayer() for _ in plain.layers]  # type: ignore[assignment]
        for start, stop in ((0, 5), (5, 9), (9, 10), (10, 11), (11, 12)):
            numbers = None if documents is None else documents[:, start:stop]
            found, expected = (decoder(ids[:, start:stop], numbers, one) for one in (cache, plain))
            assert torch.equal(found, expected)


def test_a_layer_of_the_cache_is_what_attention_asks_for() -> None:
    layer = LayerKeysValues()
    assert isinstance(layer, LayerCache) and layer.keys is None and layer.values is None
    keys, values = torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2, 8)
    assert all(map(torch.equal, layer.extend(keys, values), (keys, values)))
    assert layer.keys is not None and layer.values is not None
    assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


@torch.no_grad()
def test_documents_are_those_given_so_far() -> None:
    decoder, cache = tiny_decoder(tiny_settings()), KVCache(2, capacity=7)
    decoder(token_ids(num_tokens=2), cache=cache)
    assert cache.documents is None and cache.length == 2
    decoder(token_ids(num_tokens=3), torch.tensor([[0, 1, 1]]).expand(3, 3), cache)
    decoder(token_ids(num_tokens=1), cache=cache)
    assert cache.documents is not None and cache.documents.tolist() == [[0, 0, 0, 1, 1, 1]] * 3

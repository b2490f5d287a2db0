"""StreamingLLM token by token: keys that are evicted one at a time and turned back by one place each time.

And the small decoders that it reads, with weights wide enough for attention that is far from flat.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gatelab.gates.variants import find_variant
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.rope import rotation_at
from gatelab.model.settings import ModelSettings, RopeSettings

B, T, V = 3, 23, 97


def stream_settings(gate: str = "none", **changes: object) -> ModelSettings:
    variant = find_variant(gate)
    sizes = {
        "vocab_size": V,
        "width": 40,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_size": 8,
        "feedforward_width": 56,
        "max_context": 64,
        "init_std": 0.2,
        "rope": RopeSettings(base=90.0),
        "gates": variant.gates,
        "control": variant.control,
    }
    return ModelSettings(**{**sizes, **changes})  # type: ignore[arg-type]


def stream_decoder(settings: ModelSettings, seed: int = 0) -> Decoder:
    """In float64, with noise on every number."""
    decoder = Decoder(settings).double()
    initialize(decoder, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in decoder.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).double()
    return decoder.eval()


def token_ids(num_tokens: int = T, seed: int = 3) -> Tensor:
    return torch.randint(V, (B, num_tokens), generator=torch.Generator().manual_seed(seed))


def turned_back(keys: Tensor, rope: RopeSettings) -> Tensor:
    """Rotated keys (B S K C) moved one place towards the beginning, channel pair by channel pair."""
    moved = keys.clone()
    half = rope.rotated_channels(keys.shape[-1]) // 2
    for pair in range(half):
        angle = torch.tensor(-(rope.base ** (-pair / half)), dtype=torch.float64)
        first, second = keys[..., pair], keys[..., pair + half]
        moved[..., pair] = first * angle.cos() - second * angle.sin()
        moved[..., pair + half] = first * angle.sin() + second * angle.cos()
    return moved


class EvictingCache:
    """Rotated keys and values of one layer; forgets the oldest token that is not kept before it takes one too many."""

    def __init__(self, kept: int, window: int, rope: RopeSettings | None):
        self.kept, self.capacity, self.rope = kept, kept + window, rope
        self.tokens: list[tuple[Tensor, Tensor]] = []

    def make_room(self) -> int:
        """The place of the next token."""
        if len(self.tokens) == self.capacity:
            del self.tokens[self.kept]
            for place in range(self.kept, len(self.tokens)):
                key, value = self.tokens[place]
                self.tokens[place] = (key if self.rope is None else turned_back(key, self.rope), value)
        return len(self.tokens)

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.tokens.append((keys, values))
        all_keys, all_values = zip(*self.tokens, strict=True)
        return torch.cat(all_keys, dim=1), torch.cat(all_values, dim=1)


@torch.no_grad()
def stream_by_loops(decoder: Decoder, ids: Tensor, kept: int, window: int) -> Tensor:
    """Logits (B T V), one token at a time, each layer with a cache and positions of its own."""
    settings = decoder.settings
    ropes = [settings.rope_on_layer(number) for number in range(settings.num_layers)]
    caches = []
    for number, rope in enumerate(ropes):
        own = settings.on_layer(number).window
        caches.append(EvictingCache(kept, window if own is None else min(window, own - kept), rope))
    found = []
    for token in ids.split(1, dim=1):
        x = decoder.model.embed_tokens(token)
        for layer, cache, rope in zip(decoder.model.layers, caches, ropes, strict=True):
            place = cache.make_room()
            position = torch.full((1, 1), place)
            rotation = None if rope is None else rotation_at(position, rope, settings.head_size, torch.float64)
            sees_all = torch.ones(1, 1, 1, place + 1, dtype=torch.bool)
            x, _ = layer(x, rotation, sees_all, None, cache)
        found.append(decoder.logits(decoder.model.norm(x)))
    return torch.cat(found, dim=1)

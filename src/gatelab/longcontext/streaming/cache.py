"""The window cache of StreamingLLM (Xiao et al. 2309.17453): a few first tokens are kept, the oldest others evicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Rotate = Callable[[Tensor, Tensor], Tensor]
"""Turns heads (B T N C) to the positions (T) of their tokens."""
_HIDDEN = -torch.inf


@dataclass(frozen=True)
class WindowCache:
    """How many tokens a layer remembers: the first ``kept`` ones of the text, and the newest ``window`` ones.

    The newest one is the token that is being read. Positions are places within the cache, so the newest token never
    stands beyond ``kept + window - 1``, however long the text. Raises ``ValueError`` for numbers without a meaning.
    """

    kept: int
    window: int

    def __post_init__(self) -> None:
        if self.kept < 0:
            raise ValueError(f"kept={self.kept} is below 0; keep 0 initial tokens or more")
        if self.window < 1:
            raise ValueError(f"window={self.window} holds no token; take at least 1")

    @property
    def capacity(self) -> int:
        """Most tokens that are remembered."""
        return self.kept + self.window

    @property
    def label(self) -> str:
        """Kept and recent tokens, for readers."""
        return f"{self.kept} + {self.window}"

    def within(self, own_window: int | None) -> WindowCache:
        """This cache on a layer whose tokens by themselves see only ``own_window`` tokens, themselves included.

        The first tokens are kept there too, and the recent ones are so few that all together are ``own_window`` at
        most: no key is further back than in training. With ``kept=0`` it is the layer's own window.
        """
        if own_window is None:
            return self
        if own_window <= self.kept:
            raise ValueError(
                f"kept={self.kept} tokens fill the window of {own_window} tokens of a layer; keep fewer than that"
            )
        return WindowCache(self.kept, min(self.window, own_window - self.kept))


class Logits(NamedTuple):
    """What becomes of q . k: times ``scale``, then softly capped; ``sink`` gives the logit of a key that no token has.

    ``sink`` takes queries (B T H C) at their cache positions and gives (#B H #T); ``sink_value`` is that key's value.
    """

    scale: float
    softcap: float | None = None
    sink: Callable[[Tensor], Tensor] | None = None
    sink_value: Float[Tensor, "K C"] | None = None


class _Tokens(NamedTuple):
    """Unrotated keys and values of some tokens."""

    keys: Float[Tensor, "B S K C"]
    values: Float[Tensor, "B S K C"]

    def part(self, start: int, stop: int | None = None) -> _Tokens:
        return _Tokens(self.keys[:, start:stop], self.values[:, start:stop])

    def followed_by(self, later: _Tokens) -> _Tokens:
        return _Tokens(torch.cat((self.keys, later.keys), dim=1), torch.cat((self.values, later.values), dim=1))


class LayerStream:
    """One layer's window cache, and attention over it, for chunks of tokens that follow one another.

    Keys are remembered before their rotation and turned anew in every call, which is the re-rotation on eviction
    without a rounding error that grows. Each token sees its own window whatever the chunk: a call with T tokens gives
    what T calls with one would. With n kept tokens and a window W, the token at text position p stands at
    m = min(p, n + W - 1). It sees a kept token j <= p at distance m - j, and a recent one j, p - W < j <= p and
    j >= n, at its true distance p - j. Memory is O(n + W + T) for keys and O(T (n + W + T)) for logits.
    """

    def __init__(self, cache: WindowCache):
        self.cache = cache
        self.seen = 0
        self._kept: _Tokens | None = None
        self._recent: _Tokens | None = None

    @property
    def num_remembered(self) -> int:
        """Tokens whose keys and values are held between two calls."""
        return sum(part.keys.shape[1] for part in (self._kept, self._recent) if part is not None)

    def attend(
        self,
        query: Float[Tensor, "B T H C"],
        key: Float[Tensor, "B T K C"],
        value: Float[Tensor, "B T K C"],
        rotate: Rotate,
        logits: Logits,
    ) -> Float[Tensor, "B T H C"]:
        """Attention of the next T tokens, which the cache then holds; everything comes unrotated."""
        kept, recent = self._take(_Tokens(key, value))
        places = torch.arange(self.seen - query.shape[1], self.seen, device=query.device)
        last = self.cache.capacity - 1
        shift = max(0, self.seen - 1 - last)
        num_kept, num_recent = kept.keys.shape[1], recent.keys.shape[1]
        kept_places = torch.arange(num_kept, device=query.device)
        recent_places = torch.arange(self.seen - num_recent, self.seen, device=query.device)

        to_cache = rotate(query, places.clamp(max=last))
        blocks = [
            _products(to_cache, rotate(kept.keys, kept_places)),
            _products(rotate(query, places - shift), rotate(recent.keys, recent_places - shift)),
        ]
        visible = torch.cat((self._sees_kept(places, kept_places), self._sees_recent(places, recent_places)), dim=1)
        values = torch.cat((kept.values, recent.values), dim=1)
        self._evict(kept, recent)
        return _mix(torch.cat(blocks, dim=-1), visible, values, to_cache, logits)

    def _take(self, new: _Tokens) -> tuple[_Tokens, _Tokens]:
        """Kept and recent tokens with the new ones among them."""
        num_new = new.keys.shape[1]
        missing = min(max(0, self.cache.kept - self.seen), num_new)
        first, rest = new.part(0, missing), new.part(missing)
        self.seen += num_new
        if self._kept is None or self._recent is None:
            return first, rest
        return self._kept.followed_by(first), self._recent.followed_by(rest)

    def _evict(self, kept: _Tokens, recent: _Tokens) -> None:
        """Remember what the next token still sees: with itself it makes the window full."""
        surplus = max(0, recent.keys.shape[1] - (self.cache.window - 1))
        self._kept, self._recent = kept, recent.part(surplus)

    @staticmethod
    def _sees_kept(queries: Int[Tensor, "T"], keys: Int[Tensor, "S"]) -> Bool[Tensor, "T S"]:
        return keys <= queries[:, None]

    def _sees_recent(self, queries: Int[Tensor, "T"], keys: Int[Tensor, "S"]) -> Bool[Tensor, "T S"]:
        return (keys <= queries[:, None]) & (keys > queries[:, None] - self.cache.window)


def _products(query: Float[Tensor, "B T H C"], key: Float[Tensor, "B S K C"]) -> Float[Tensor, "B H T S"]:
    """q . k of every query head with its key head, in float32 at least."""
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(wide).unflatten(2, (key.shape[2], -1))
    return torch.einsum("btkgc,bskc->bkgts", grouped, key.to(wide)).flatten(1, 2)


def _mix(
    products: Float[Tensor, "B H T S"],
    visible: Bool[Tensor, "T S"],
    values: Float[Tensor, "B S K C"],
    query: Float[Tensor, "B T H C"],
    logits: Logits,
) -> Float[Tensor, "B T H C"]:
    """Softmax over the visible keys, the sink among them, and the mean of their values."""
    entries = products * logits.scale
    if logits.softcap is not None:
        entries = (entries / logits.softcap).tanh() * logits.softcap
    entries = entries.masked_fill(~visible, _HIDDEN)
    if logits.sink is not None:
        sink = logits.sink(query).to(entries.dtype)[..., None]
        entries = torch.cat((entries, sink.expand(*entries.shape[:3], 1)), dim=-1)
    weights = entries.softmax(dim=-1).unflatten(1, (values.shape[2], -1))
    num_keys = values.shape[1]
    output = torch.einsum("bkgts,bskc->btkgc", weights[..., :num_keys], values.to(entries.dtype))
    if logits.sink_value is not None:
        share = weights[..., num_keys].permute(0, 3, 1, 2)[..., None]
        output = output + share * logits.sink_value.to(entries.dtype)[:, None]
    return output.flatten(2, 3).to(query.dtype)

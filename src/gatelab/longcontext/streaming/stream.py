"""The loss of a model that reads a text longer than what its layers remember, with and without its first tokens.

A model whose heads rest on the first token as a sink loses it with the first eviction (Xiao et al. 2309.17453); a
model without a sink should not mind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gatelab.data.settings import CorpusSettings
from gatelab.evaluate.models import OpenedModel, open_model, short_names
from gatelab.evaluate.texts import Windows, read_windows
from gatelab.longcontext.streaming.cache import WindowCache
from gatelab.longcontext.streaming.models import require_streamable, streaming
from gatelab.model.perplexity import token_nats

CHUNK = 64


@dataclass(frozen=True)
class StreamingTest:
    """On what text, and with which caches, models are streamed.

    ``samples`` texts of ``tokens`` tokens follow one another in the source and are read side by side, each from an
    empty cache. Every number in ``kept`` is a cache of its own, with ``window`` recent tokens beside the kept ones.
    Raises ``ValueError`` for numbers without a meaning.
    """

    text: CorpusSettings
    folder: Path
    window: int = 256
    kept: tuple[int, ...] = (0, 4)
    tokens: int = 20_000
    samples: int = 1

    def __post_init__(self) -> None:
        if not self.kept:
            raise ValueError("kept names no cache; give at least one number of initial tokens, such as 0")
        if repeated := sorted({kept for kept in self.kept if self.kept.count(kept) > 1}):
            raise ValueError(f"kept={repeated[0]} is given twice; give each number of initial tokens once")
        if self.samples < 1:
            raise ValueError(f"samples={self.samples} reads nothing; take at least 1")
        _require_eviction(self.tokens, self.caches, f"tokens={self.tokens}")

    @property
    def caches(self) -> list[WindowCache]:
        """One for each number of kept tokens, in ascending order."""
        return [WindowCache(kept, self.window) for kept in sorted(self.kept)]

    @property
    def largest(self) -> WindowCache:
        """The cache with the most kept tokens."""
        return self.caches[-1]


class StreamedLoss(NamedTuple):
    """Cross-entropy of each token after the first, in nats; ``cache`` is ``None`` where nothing was evicted.

    Without eviction the text ends with the model's context, so there may be fewer tokens.
    """

    cache: WindowCache | None
    nats: Float[np.ndarray, "B T1"]

    @property
    def label(self) -> str:
        """Kept and recent tokens, or ``all`` where nothing was evicted."""
        return "all" if self.cache is None else self.cache.label


class StreamedModel(NamedTuple):
    """One model's losses, the one without eviction last, and under which conditions they were measured."""

    name: str
    losses: list[StreamedLoss]
    context: dict[str, Any]


def stream_models(
    names: Sequence[str], test: StreamingTest, say: Callable[[str], None] = lambda sentence: None
) -> list[StreamedModel]:
    """Stream each model over the same text with every cache, and once without eviction, up to its context.

    All models are opened and checked before the first one reads; ``say`` is told what begins. Raises ``ValueError``
    with one sentence for two models of one name, what :func:`open_model` refuses, a cache beyond a model's context, a
    text too short to evict anything, and a model that can't be streamed.
    """
    if len(set(names)) < len(names):
        raise ValueError(f"{names[0]} would be compared with itself; name another model, or leave out --compare")
    opened = [open_model(name) for name in names]
    for one in opened:
        _require_context(one, test.largest)
    texts = [
        read_windows(test.text, one.tokenizer, test.folder, length=test.tokens, samples=test.samples) for one in opened
    ]
    for one, text in zip(opened, texts, strict=True):
        num_tokens = text.tokens.shape[1]
        _require_eviction(num_tokens, test.caches, f"the text {test.text.label} of {num_tokens} tokens")
        require_streamable(one.model, test.caches, text.tokens)
        if text.tokens.shape != (test.samples, test.tokens):
            found, asked = f"{len(text.tokens)} x {num_tokens:,}", f"{test.samples} x {test.tokens:,}"
            say(f"{one.name}: the text {test.text.label} holds {found} of the {asked} tokens asked for")
    return [_stream(*each, test, say) for each in zip(short_names(names), opened, texts, strict=True)]


@torch.no_grad()
def stream_losses(
    model: nn.Module, tokens: Int[Tensor, "B T"], cache: WindowCache, chunk: int = CHUNK
) -> Float[Tensor, "B T1"]:
    """-ln p of each token after the first, read through the window cache, in float32 at least.

    The losses do not depend on ``chunk``, the number of tokens that are read at once.
    """
    with streaming(model, cache) as read:
        parts = [
            token_nats(read(inputs), targets)
            for inputs, targets in zip(tokens[:, :-1].split(chunk, 1), tokens[:, 1:].split(chunk, 1), strict=True)
        ]
    return torch.cat(parts, dim=1)


def _stream(
    name: str, opened: OpenedModel, text: Windows, test: StreamingTest, say: Callable[[str], None]
) -> StreamedModel:
    losses = []
    for cache in [*test.caches, None]:
        tokens, used = text.tokens, cache
        if used is None:
            tokens = tokens[:, : opened.max_context]
            used = WindowCache(0, tokens.shape[1])
        say(f"{name}: {tokens.numel():,} tokens, {'all remembered' if cache is None else cache.label}")
        losses.append(StreamedLoss(cache, stream_losses(opened.model, tokens, used).double().numpy()))
    model = {"family": opened.family, "step": opened.step, "max_context": opened.max_context, **opened.description}
    return StreamedModel(name, losses, {**text.context, **model})


def _require_context(opened: OpenedModel, cache: WindowCache) -> None:
    if opened.max_context is not None and cache.capacity > opened.max_context:
        raise ValueError(
            f"window={cache.window} and kept={cache.kept} are {cache.capacity} tokens, above the {opened.max_context} "
            f"that {opened.name} was made for; take a smaller window"
        )


def _require_eviction(num_tokens: int, caches: Sequence[WindowCache], what: str) -> None:
    largest = caches[-1]
    if num_tokens <= largest.capacity + 1:
        raise ValueError(
            f"{what} evicts nothing: window={largest.window} and kept={largest.kept} hold {largest.capacity} tokens; "
            "take a longer text or a smaller window"
        )

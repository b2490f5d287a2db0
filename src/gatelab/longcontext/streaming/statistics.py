"""Streamed losses by text position: bins, means and intervals over blocks of neighbouring tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

from gatelab.longcontext.streaming.stream import StreamedLoss, StreamedModel

BLOCK = 32
"""Tokens that enter an interval as one observation, because the losses of neighbours go together."""
_MOST_BINS, _LEAST_BLOCKS = 40, 8


class Mean(NamedTuple):
    """A mean over tokens with its 95 % interval; that is ``None`` for fewer than two blocks of tokens."""

    value: float
    low: float | None
    high: float | None
    num_tokens: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """The two ends, if there are any."""
        return None if self.low is None or self.high is None else (self.low, self.high)


class Span(NamedTuple):
    """The tokens ``start`` up to ``stop`` of a text, counted from 0."""

    start: int
    stop: int

    def of(self, nats: Float[np.ndarray, "B T1"]) -> Float[np.ndarray, "B T2"]:
        """The losses of these tokens; those of all but the first token are given."""
        return nats[:, self.start - 1 : self.stop - 1]


def block_mean(values: Float[np.ndarray, "B T"]) -> Mean:
    """The mean, with Student's t interval over the means of blocks of :data:`BLOCK` neighbouring tokens.

    The interval speaks of this kind of text and this model. A last piece shorter than a block is in the mean alone.
    """
    num_whole = values.shape[1] // BLOCK
    means = values[:, : num_whole * BLOCK].reshape(-1, BLOCK).mean(axis=1)
    value, count = float(values.mean()), len(means)
    if count < 2:
        return Mean(value, None, None, values.size)
    half = float(stdtrit(count - 1, 0.975) * means.std(ddof=1) / np.sqrt(count))
    return Mean(value, value - half, value + half, values.size)


class StreamSummary(NamedTuple):
    """A cache's mean losses (nats per token) on spans that are the same for all caches of a model.

    ``before``: nothing was evicted yet, by any cache. ``after``: every cache has evicted tokens. ``over_most_kept`` is
    ``after`` minus that of the cache with the most kept tokens, paired by token; ``over_full`` minus that of the model
    without eviction, as far as its context reaches; both ``None`` where there is nothing to compare with.
    """

    loss: StreamedLoss
    before: Mean
    after: Mean | None
    over_most_kept: Mean | None
    over_full: Mean | None


def summarize(model: StreamedModel) -> list[StreamSummary]:
    """The summary of each cache, and of the model without eviction as far as its context reaches."""
    *streamed, full = model.losses
    fullest = streamed[-1]
    assert fullest.cache is not None and full.cache is None
    num_tokens, first = fullest.nats.shape[1] + 1, fullest.cache.capacity + 1
    before, after = Span(1, fullest.cache.window + 1), Span(first, num_tokens)
    shared = Span(first, full.nats.shape[1] + 1)
    found = []
    for loss in model.losses:
        whole = loss.nats.shape == fullest.nats.shape
        found.append(
            StreamSummary(
                loss,
                before=block_mean(before.of(loss.nats)),
                after=block_mean(after.of(loss.nats)) if whole else None,
                over_most_kept=_difference(loss, fullest, after) if whole and loss is not fullest else None,
                over_full=_difference(loss, full, shared) if loss is not full else None,
            )
        )
    return found


def bin_rows(model: StreamedModel) -> list[dict[str, Any]]:
    """Mean losses by text position: a row for each cache and bin of equally many tokens.

    ``cost`` is the loss minus that of the cache with the most kept tokens, on the same tokens.
    """
    fullest = model.losses[-2]
    rows = []
    for loss in model.losses:
        for span in _bins(loss.nats.shape[1] + 1, fullest.nats.shape[1] + 1):
            mean = block_mean(span.of(loss.nats))
            cost = block_mean(span.of(loss.nats) - span.of(fullest.nats))
            rows.append({
                "model": model.name,
                "cache": loss.label,
                "kept": None if loss.cache is None else loss.cache.kept,
                "window": None if loss.cache is None else loss.cache.window,
                "start": span.start,
                "stop": span.stop,
                "middle": (span.start + span.stop - 1) / 2,
                "tokens": mean.num_tokens,
                "loss": mean.value,
                "low": mean.low,
                "high": mean.high,
                "cost": cost.value,
                "cost_low": cost.low,
                "cost_high": cost.high,
            })  # fmt: skip
    return rows


def _difference(loss: StreamedLoss, other: StreamedLoss, span: Span) -> Mean | None:
    if span.start >= span.stop:
        return None
    return block_mean(span.of(loss.nats) - span.of(other.nats))


def _bins(num_tokens: int, num_all: int) -> list[Span]:
    """Bins of whole blocks, at most 40 in ``num_all`` tokens; a last piece of less than half a bin is left out."""
    step = BLOCK * _LEAST_BLOCKS
    width = step * max(1, round(num_all / (_MOST_BINS * step)))
    spans = [Span(start, min(start + width, num_tokens)) for start in range(1, num_tokens, width)]
    return [span for span in spans if 2 * (span.stop - span.start) >= width]

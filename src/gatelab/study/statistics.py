"""Uncertainty of a difference between two arms that were scored on the same documents."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


class DocumentScores(NamedTuple):
    """Summed cross-entropy (nats), scored tokens and UTF-8 bytes of each held-out document, arrays of equal length."""

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray


class TextDifference(NamedTuple):
    """One arm against another on the same text: perplexity as a ratio minus one, bits per byte as a difference."""

    relative_perplexity: Estimate
    bits_per_byte: Estimate


def compare_on_documents(
    arm: DocumentScores, baseline: DocumentScores, num_resamples: int = 2000, seed: int = 0
) -> TextDifference:
    """Differences with intervals from a paired bootstrap over documents (percentiles 2.5 and 97.5).

    The interval says how far the choice of held-out text moves the difference. It knows nothing of what another seed
    would have trained. Raises ``ValueError`` when the two were not scored on the same documents.
    """
    if not (np.array_equal(arm.tokens, baseline.tokens) and np.array_equal(arm.bytes, baseline.bytes)):
        raise ValueError("the two arms were scored on different documents or with different tokenizers")
    columns = np.stack([arm.nats - baseline.nats, arm.tokens, arm.bytes])
    num_documents = columns.shape[1]
    rng = np.random.default_rng(seed)
    times_drawn = rng.multinomial(num_documents, np.full(num_documents, 1 / num_documents), size=num_resamples)
    value = _differences(columns.sum(axis=1))
    low, high = np.percentile(_differences(columns @ times_drawn.T), [2.5, 97.5], axis=1)
    relative, bits = (Estimate(*(float(number) for number in triple)) for triple in zip(value, low, high, strict=True))
    return TextDifference(relative, bits)


def _differences(sums: np.ndarray) -> np.ndarray:
    """Relative perplexity and bits per byte from summed (difference in nats, tokens, bytes), along the first axis."""
    nats, tokens, num_bytes = sums
    return np.stack([np.expm1(nats / tokens), nats / (np.log(2) * num_bytes)])

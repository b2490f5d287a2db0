"""Uncertainty of a difference between two arms: over seeds, and over the documents that both were scored on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import chdtri, ndtri, stdtr, stdtrit

LEVEL = 0.05
"""Rate of false positives that intervals and verdicts are made for."""


class Estimate(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


class PairedDifference(NamedTuple):
    """An arm's metric minus the baseline's, over seeds that both were trained with.

    ``correlation`` is that of the two arms over the seeds: the higher, the more pairing by seed has helped. It is
    ``None`` when one of them is the same at every seed.
    """

    difference: Estimate
    standard_deviation: float
    num_seeds: int
    p_value: float
    correlation: Estimate | None


class DocumentScores(NamedTuple):
    """Summed cross-entropy (nats), scored tokens and UTF-8 bytes of each held-out document, arrays of equal length."""

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray


class TextDifference(NamedTuple):
    """One arm against another on the same text: perplexity as a ratio minus one, bits per byte as a difference."""

    relative_perplexity: Estimate
    bits_per_byte: Estimate


def paired_difference(arm: Float[np.ndarray, "S"], baseline: Float[np.ndarray, "S"]) -> PairedDifference:
    """The mean difference of two arms over the same seeds, with its t interval, p-value and the arms' correlation.

    Raises ``ValueError`` when the arms have other numbers of seeds, fewer than two, or a value that is not finite.
    """
    if arm.shape != baseline.shape:
        raise ValueError(f"{len(arm)} seeds of one arm can't be paired with {len(baseline)} of the other; train both")
    if len(arm) < 2:
        raise ValueError(f"{len(arm)} seed says nothing about other seeds; train with at least 2")
    differences = arm - baseline
    if not np.isfinite(differences).all():
        raise ValueError("a run that diverged has no difference to the other arm; compare arms whose runs all finished")
    return PairedDifference(
        difference=t_interval(differences),
        standard_deviation=float(differences.std(ddof=1)),
        num_seeds=len(differences),
        p_value=float(difference_p_values(differences)),
        correlation=correlation(arm, baseline),
    )


def t_interval(values: Float[np.ndarray, "S"], level: float = LEVEL) -> Estimate:
    """The mean with its interval mean -/+ t s / sqrt(S), which misses the true mean at the rate ``level``.

    t is the (1 - level / 2) quantile of Student's distribution with S - 1 degrees of freedom (Student 1908, "The
    probable error of a mean"), s the standard deviation with divisor S - 1. Needs two values.
    """
    assert len(values) >= 2, "an interval takes two values"
    mean = float(values.mean())
    half = float(stdtrit(len(values) - 1, 1 - level / 2) * _standard_error(values))
    return Estimate(mean, mean - half, mean + half)


def difference_p_values(differences: Float[np.ndarray, "*studies S"]) -> Float[np.ndarray, "*studies"]:
    """Two-sided p-values of "the true mean is 0" by Student's t-test, one for each row of S paired differences.

    Equal differences have no spread to judge by: p is 1 where they are all 0, and 0 where they are not.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = np.abs(differences.mean(axis=-1)) / _standard_error(differences)
    return np.where(np.isnan(statistic), 1.0, 2 * stdtr(differences.shape[-1] - 1, -statistic))


def equality_p_values(
    differences: Float[np.ndarray, "*studies S"], smallest_difference: float
) -> Float[np.ndarray, "*studies"]:
    """p-values of "the true mean is at least ``smallest_difference`` away from 0", one for each row.

    Two one-sided t-tests (Schuirmann 1987, "A comparison of the two one-sided tests procedure and the power approach
    for assessing the equivalence of average bioavailability"), of which the larger p-value counts: the one against the
    nearer bound, P(T > (d - |mean|) / (s / sqrt(S))). It is at most ``level`` exactly when the t interval that misses
    at the rate 2 ``level`` lies inside -d to d.
    """
    room = smallest_difference - np.abs(differences.mean(axis=-1))
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = room / _standard_error(differences)
    return np.where(np.isnan(statistic), 1.0, stdtr(differences.shape[-1] - 1, -statistic))


def correlation(arm: Float[np.ndarray, "S"], baseline: Float[np.ndarray, "S"]) -> Estimate | None:
    """Pearson's correlation of two arms over seeds, with the interval tanh(artanh(r) -/+ 1.96 / sqrt(S - 3)).

    After Fisher (1915, 1921). Three seeds or fewer leave everything from -1 to 1 open. ``None`` when an arm has the
    same value at every seed.
    """
    a, b = arm - arm.mean(), baseline - baseline.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    if size == 0:
        return None
    r = float(np.clip(a @ b / size, -1, 1))
    if len(arm) <= 3:
        return Estimate(r, -1.0, 1.0)
    if abs(r) == 1:
        return Estimate(r, r, r)
    half = ndtri(1 - LEVEL / 2) / np.sqrt(len(arm) - 3)
    return Estimate(r, float(np.tanh(np.arctanh(r) - half)), float(np.tanh(np.arctanh(r) + half)))


def standard_deviation_interval(standard_deviation: float, num_seeds: int) -> Estimate:
    """A measured standard deviation with the interval s sqrt((S - 1) / q), q a chi-square quantile of S - 1 degrees.

    Of normally distributed values (Cochran 1934). With 5 seeds it reaches from 0.60 to 2.87 times the measured one.
    """
    degrees = num_seeds - 1
    low, high = (np.sqrt(degrees / chdtri(degrees, tail)) for tail in (LEVEL / 2, 1 - LEVEL / 2))
    return Estimate(standard_deviation, float(standard_deviation * low), float(standard_deviation * high))


def learning_rate_sensitivity(losses: Float[np.ndarray, "R S"], initial_loss: float) -> Float[np.ndarray, "S"]:
    """How much loss a learning rate other than the best costs, averaged over a grid of R rates; one value a seed.

    Mean over the rates of min(l(rate), l0) - l*, with l* the least loss on the grid (Wortsman et al. 2309.14322,
    section 2.2). The paper's l0 is the loss of the untrained model, about ln V, which is that of predicting every token
    alike. A run that diverged counts as l0 whatever its last loss: put nan or infinity in its place. The grid should
    have equal ratios between its rates, so that the mean is one over the rate's logarithm, and be the same for all arms
    that are compared. Where we differ: l* is cut at l0 too, so a grid on which nothing learns has sensitivity 0.

    Raises ``ValueError`` for fewer than two rates or an initial loss that is not finite.
    """
    if len(losses) < 2 or not np.isfinite(initial_loss):
        raise ValueError(
            f"{len(losses)} learning rates with initial_loss={initial_loss:g} have no sensitivity; "
            "give losses at two rates or more, and the finite loss of the untrained model"
        )
    counted = np.fmin(losses, initial_loss)  # which passes over nan
    return (counted - counted.min(axis=0)).mean(axis=0)


def average_over_seeds(scores: Sequence[DocumentScores]) -> DocumentScores:
    """Each document's cross-entropy averaged over an arm's seeds, to be compared on documents as one run would be.

    The perplexity ratio of two such averages is the geometric mean of the ratios of the seeds. Raises ``ValueError``
    when the seeds were not scored on the same documents.
    """
    for one in scores:
        _require_same_documents(one, scores[0])
    return scores[0]._replace(nats=np.mean([one.nats for one in scores], axis=0))


def compare_on_documents(
    arm: DocumentScores, baseline: DocumentScores, num_resamples: int = 2000, seed: int = 0
) -> TextDifference:
    """Differences with intervals from a paired bootstrap over documents (percentiles 2.5 and 97.5).

    The interval says how far the choice of held-out text moves the difference. It knows nothing of what another seed
    would have trained. Raises ``ValueError`` when the two were not scored on the same documents.
    """
    _require_same_documents(arm, baseline)
    columns = np.stack([arm.nats - baseline.nats, arm.tokens, arm.bytes])
    num_documents = columns.shape[1]
    rng = np.random.default_rng(seed)
    times_drawn = rng.multinomial(num_documents, np.full(num_documents, 1 / num_documents), size=num_resamples)
    value = _differences(columns.sum(axis=1))
    low, high = np.percentile(_differences(columns @ times_drawn.T), [2.5, 97.5], axis=1)
    relative, bits = (Estimate(*(float(number) for number in triple)) for triple in zip(value, low, high, strict=True))
    return TextDifference(relative, bits)


def _require_same_documents(arm: DocumentScores, baseline: DocumentScores) -> None:
    if not (np.array_equal(arm.tokens, baseline.tokens) and np.array_equal(arm.bytes, baseline.bytes)):
        raise ValueError("the two arms were scored on different documents or with different tokenizers")


def _differences(sums: np.ndarray) -> np.ndarray:
    """Relative perplexity and bits per byte from summed (difference in nats, tokens, bytes), along the first axis."""
    nats, tokens, num_bytes = sums
    return np.stack([np.expm1(nats / tokens), nats / (np.log(2) * num_bytes)])


def _standard_error(values: Float[np.ndarray, "*studies S"]) -> Float[np.ndarray, "*studies"]:
    return np.asarray(values.std(axis=-1, ddof=1) / np.sqrt(values.shape[-1]))

"""Gate scores: how open, how sparse, and whether a gate shuts where its head parks attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gatelab.diagnose.attention import widened

HISTOGRAM_BINS = 20
_FINE_BINS = 2000  # bins of 0.0005: all thresholds below are edges of them
_MOST_COUNTED = 2**24  # a float32 count stops here
BOUNDED_ACTIVATIONS = frozenset({"sigmoid", "ns_sigmoid", "double_sigmoid"})
SHUT_BELOW, SHUT_SHARE, SPARSE_SHARE, TOKENS_TO_JUDGE = 0.05, 0.999, 0.95, 10_000


class ScoreStatistics(NamedTuple):
    """Statistics of ``n`` scores: all of a gate, or those of one of its heads.

    ``histogram`` counts 20 equal bins of [0, 1], values beyond in the end bins. ``first_token_mean`` is over the first
    real token of each document, ``rest_mean`` over the others; both ``None`` for an input-independent gate. A gate is
    shut when 99.9 % of its scores are below 0.05, and sparse when 95 % are. ``None``: that is not said with fewer than
    10,000 tokens, of scores that are added, and of activations that are not bounded (an activation that is not known
    passes for bounded while all scores lie in [0, 1]).
    """

    mean: float
    below_hundredth: float
    below_tenth: float
    above_nine_tenths: float
    first_token_mean: float | None
    rest_mean: float | None
    first_token_n: int
    is_shut: bool | None
    is_sparse: bool | None
    histogram: list[int]
    n: int


class GateStatistics(NamedTuple):
    """One gate of one layer: all its scores, and head by head.

    ``sink_correlation`` is by query head: Pearson's correlation over queries between the query's score (mean over
    channels; of its key/value head for value and key gates) and its attention to the first real key, that key's own
    query left out. ``None`` where one of them does not vary. ``queries`` counts them, ``tokens`` all real
    tokens.
    """

    whole: ScoreStatistics
    by_head: list[ScoreStatistics]
    sink_correlation: list[float | None]
    tokens: int
    queries: int


class GateTotals:
    """Running sums of one gate's scores on one layer, by head."""

    def __init__(self, activation: str | None = None, is_added: bool = False):
        self.activation, self.is_added = activation, is_added
        self.tokens = 0
        self.histograms: Int[Tensor, "N fine_bins"] | None = None
        self.sums: Float[Tensor, "N 2"] | None = None
        self.scores_by_head, self.first_scores_by_head, self.within_unit = 0, 0, True
        self.moments: Float[Tensor, "5 H"] | None = None
        self.pairs = 0
        self.depends_on_input = True

    def add(
        self,
        scores: Float[Tensor, "#B #T N C1"],
        real: Bool[Tensor, "#B T"],
        is_first: Bool[Tensor, "#B T"],
        num_samples: int,
    ) -> None:
        """Add one pass. An input-independent gate (T = 1) has one score for all tokens and counts once."""
        real = real.expand(num_samples, -1)
        self.tokens += int(real.sum())
        self.depends_on_input = scores.shape[1] == real.shape[1]
        if not self.depends_on_input:
            if self.histograms is None:
                self._add_scores(widened(scores).flatten(0, 1), is_first.new_zeros(1))
            return
        scores, is_first = widened(scores).flatten(0, 1), is_first.expand_as(real).flatten()
        if not real.all():
            scores, is_first = scores[real.flatten()], is_first[real.flatten()]
        self._add_scores(scores, is_first)

    def _add_scores(self, scores: Float[Tensor, "tokens N C1"], is_first: Bool[Tensor, "tokens"]) -> None:
        per_head = scores.transpose(0, 1).flatten(1)
        histograms = torch.stack([_fine_histogram(one) for one in per_head]).cpu()
        by_token = scores.sum(2, dtype=torch.float64)
        sums = torch.stack([part.sum(0) for part in (by_token, by_token[is_first])], dim=1).cpu()
        self.within_unit &= bool(((per_head >= 0) & (per_head <= 1)).all())
        self.histograms = histograms if self.histograms is None else self.histograms + histograms
        self.sums = sums if self.sums is None else self.sums + sums
        self.scores_by_head += per_head.shape[1]
        self.first_scores_by_head += int(is_first.sum()) * scores.shape[2]

    def add_pairs(
        self,
        scores: Float[Tensor, "#B #T N C1"],
        mass: Float[Tensor, "B H T"],
        counted: Bool[Tensor, "#B T"],
    ) -> None:
        """Add the counted queries' pairs of score and attention to the first real key, for the correlation."""
        if scores.shape[1] != mass.shape[2]:
            return
        by_head = widened(scores).mean(3).transpose(1, 2)
        by_head = by_head.repeat_interleave(mass.shape[1] // by_head.shape[1], 1)
        counted = counted.expand(len(mass), -1)
        x, y = (torch.where(counted[:, None], one, 0).double() for one in (by_head, mass))
        moments = torch.stack([one.sum((0, 2)) for one in (x, y, x * x, y * y, x * y)]).cpu()
        self.moments = moments if self.moments is None else self.moments + moments
        self.pairs += int(counted.sum())

    def statistics(self) -> GateStatistics | None:
        """The figures over all passes; ``None`` when no real token came."""
        if self.histograms is None or self.sums is None or not self.scores_by_head:
            return None
        parts = (self.histograms, self.sums)
        heads = [self._statistics(*head, num_heads=1) for head in zip(*parts, strict=True)]
        whole = self._statistics(*(part.sum(0) for part in parts), num_heads=len(self.histograms))
        return GateStatistics(whole, heads, self._correlation(), self.tokens, self.pairs)

    def _statistics(
        self, histogram: Int[Tensor, "fine_bins"], sums: Float[Tensor, "2"], num_heads: int
    ) -> ScoreStatistics:
        n, first = num_heads * self.scores_by_head, num_heads * self.first_scores_by_head
        total, first_total = sums.tolist()
        below_hundredth, below_limit, below_tenth, below_nine_tenths = (
            float(histogram[: round(limit * _FINE_BINS)].sum()) / n for limit in (0.01, SHUT_BELOW, 0.1, 0.9)
        )
        judged = self._can_be_judged()
        return ScoreStatistics(
            mean=total / n,
            below_hundredth=below_hundredth,
            below_tenth=below_tenth,
            above_nine_tenths=1 - below_nine_tenths,
            first_token_mean=first_total / first if first else None,
            rest_mean=(total - first_total) / (n - first) if self.depends_on_input and n > first else None,
            first_token_n=first,
            is_shut=below_limit >= SHUT_SHARE if judged else None,
            is_sparse=below_limit >= SPARSE_SHARE if judged else None,
            histogram=histogram.view(HISTOGRAM_BINS, -1).sum(1).tolist(),
            n=n,
        )

    def _can_be_judged(self) -> bool:
        is_bounded = self.within_unit if self.activation is None else self.activation in BOUNDED_ACTIVATIONS
        return is_bounded and not self.is_added and self.tokens >= TOKENS_TO_JUDGE

    def _correlation(self) -> list[float | None]:
        if self.moments is None or not self.pairs:
            return []
        x, y, xx, yy, xy = self.moments / self.pairs
        found: list[float | None] = []
        for covariance, *variances in zip(xy - x * y, xx - x * x, yy - y * y, strict=True):
            # A variance that is all rounding error is none.
            has_spread = all(
                variance > 1e-12 * mean for variance, mean in zip(variances, (xx.max(), yy.max()), strict=True)
            )
            found.append(float(covariance / (variances[0] * variances[1]).sqrt()) if has_spread else None)
        return found


def _fine_histogram(scores: Float[Tensor, "n"]) -> Int[Tensor, "fine_bins"]:
    pieces = scores.clamp(0, 1).split(_MOST_COUNTED)
    return torch.stack([torch.histc(piece, _FINE_BINS, min=0, max=1).long() for piece in pieces]).sum(0)

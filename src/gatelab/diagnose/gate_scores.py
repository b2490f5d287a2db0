"""Gate scores: how open, how sparse, and whether a gate shuts where its head parks attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gatelab.diagnose.attention import widened
from gatelab.diagnose.correlation import Correlation, CorrelationTotals
from gatelab.diagnose.entropy import binary_entropy, histogram_entropy

HISTOGRAM_BINS = 20
_FINE_BINS = 2000  # bins of 0.0005: all thresholds below are edges of them
_MOST_COUNTED = 2**24  # a float32 count stops here
UNIT_ACTIVATIONS = frozenset({"sigmoid", "ns_sigmoid"})
BOUNDED_ACTIVATIONS = UNIT_ACTIVATIONS | {"double_sigmoid"}
SHUT_BELOW, SHUT_SHARE, SPARSE_SHARE, TOKENS_TO_JUDGE = 0.05, 0.999, 0.95, 10_000


class ScoreStatistics(NamedTuple):
    """Statistics of ``n`` scores: all of a gate, or those of one of its heads.

    ``histogram`` counts 20 equal bins of [0, 1], values beyond in the end bins. ``first_token_mean`` is over the first
    real token of each document, ``rest_mean`` over the others; both ``None`` for an input-independent gate. A gate is
    shut when 99.9 % of its scores are below 0.05, and sparse when 95 % are. ``None``: that is not said with fewer than
    10,000 tokens, of scores that are added, and of activations that are not bounded (an activation that is not known
    passes for bounded while all scores lie in [0, 1]).

    ``binary_entropy`` is the mean of :func:`~gatelab.diagnose.entropy.binary_entropy` over the scores: how undecided
    they are. ``histogram_entropy`` is that of the 20 bins: how much they differ, at most log 20 = 3.0. Both in nats,
    and ``None`` for scores that are added or, by their activation or by their values, no share between 0 and 1.
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
    binary_entropy: float | None
    histogram_entropy: float | None
    histogram: list[int]
    n: int


class GateStatistics(NamedTuple):
    """One gate of one layer: all its scores, and head by head.

    ``sink_correlation`` is by query head: Pearson's correlation over queries between the query's score (mean over
    channels; of its key/value head for value and key gates) and its attention to the first real key, that key's own
    query left out. ``None`` where one of them does not vary. ``queries`` counts them, ``tokens`` all real
    tokens. ``entropy_correlation`` is that of the same score with the entropy of the head's attention at that query,
    over the queries that see two keys or more; ``None`` for an input-independent gate. Entropy grows with the number of
    keys, so a score that changes along the text correlates with it.
    """

    whole: ScoreStatistics
    by_head: list[ScoreStatistics]
    sink_correlation: list[float | None]
    entropy_correlation: Correlation | None
    tokens: int
    queries: int


class GateTotals:
    """Running sums of one gate's scores on one layer, by head."""

    def __init__(self, activation: str | None = None, is_added: bool = False):
        self.activation, self.is_added = activation, is_added
        self.tokens = 0
        self.histograms: Int[Tensor, "N fine_bins"] | None = None
        self.sums: Float[Tensor, "N 3"] | None = None
        self.scores_by_head, self.first_scores_by_head, self.within_unit = 0, 0, True
        self.with_sink, self.with_entropy = CorrelationTotals(), CorrelationTotals()
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
        entropy = binary_entropy(scores.clamp(0, 1)).sum(2, dtype=torch.float64)
        sums = torch.stack([part.sum(0) for part in (by_token, by_token[is_first], entropy)], dim=1).cpu()
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
        _add_pairs(self.with_sink, scores, mass, counted)

    def add_entropies(
        self,
        scores: Float[Tensor, "#B #T N C1"],
        entropy: Float[Tensor, "B H T"],
        counted: Bool[Tensor, "#B T"],
    ) -> None:
        """Add the counted queries' pairs of score and entropy of attention, for the correlation."""
        _add_pairs(self.with_entropy, scores, entropy, counted)

    def statistics(self) -> GateStatistics | None:
        """The figures over all passes; ``None`` when no real token came."""
        if self.histograms is None or self.sums is None or not self.scores_by_head:
            return None
        parts = (self.histograms, self.sums)
        heads = [self._statistics(*head, num_heads=1) for head in zip(*parts, strict=True)]
        whole = self._statistics(*(part.sum(0) for part in parts), num_heads=len(self.histograms))
        with_sink = self.with_sink.correlation()
        return GateStatistics(
            whole=whole,
            by_head=heads,
            sink_correlation=with_sink.by_head if with_sink else [],
            entropy_correlation=self.with_entropy.correlation(),
            tokens=self.tokens,
            queries=self.with_sink.count,
        )

    def _statistics(
        self, histogram: Int[Tensor, "fine_bins"], sums: Float[Tensor, "3"], num_heads: int
    ) -> ScoreStatistics:
        n, first = num_heads * self.scores_by_head, num_heads * self.first_scores_by_head
        total, first_total, entropy = sums.tolist()
        counts = histogram.view(HISTOGRAM_BINS, -1).sum(1)
        below_hundredth, below_limit, below_tenth, below_nine_tenths = (
            float(histogram[: round(limit * _FINE_BINS)].sum()) / n for limit in (0.01, SHUT_BELOW, 0.1, 0.9)
        )
        judged, is_share = self._can_be_judged(), self._is_share()
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
            binary_entropy=entropy / n if is_share else None,
            histogram_entropy=float(histogram_entropy(counts)) if is_share else None,
            histogram=counts.tolist(),
            n=n,
        )

    def _can_be_judged(self) -> bool:
        is_bounded = self.within_unit if self.activation is None else self.activation in BOUNDED_ACTIVATIONS
        return is_bounded and not self.is_added and self.tokens >= TOKENS_TO_JUDGE

    def _is_share(self) -> bool:
        is_named = self.activation is None or self.activation in UNIT_ACTIVATIONS
        return is_named and self.within_unit and not self.is_added


def _add_pairs(
    totals: CorrelationTotals,
    scores: Float[Tensor, "#B #T N C1"],
    of_attention: Float[Tensor, "B H T"],
    counted: Bool[Tensor, "#B T"],
) -> None:
    """Each query head's own score, mean over channels; nothing of an input-independent gate."""
    num_samples, num_heads, num_queries = of_attention.shape
    if scores.shape[1] == num_queries:
        by_head = widened(scores).mean(3).transpose(1, 2)
        by_head = by_head.repeat_interleave(num_heads // by_head.shape[1], 1).expand(num_samples, -1, -1)
        totals.add(by_head, of_attention, counted)


def _fine_histogram(scores: Float[Tensor, "n"]) -> Int[Tensor, "fine_bins"]:
    pieces = scores.clamp(0, 1).split(_MOST_COUNTED)
    return torch.stack([torch.histc(piece, _FINE_BINS, min=0, max=1).long() for piece in pieces]).sum(0)

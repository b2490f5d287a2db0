"""The arms of a study against its baseline: verdicts for what was declared in advance, intervals for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from gatelab.settings import nearest
from gatelab.study.power import minimum_detectable_difference, seeds_for_verdict
from gatelab.study.statistics import (
    LEVEL,
    Estimate,
    PairedDifference,
    difference_p_values,
    equality_p_values,
    paired_difference,
    standard_deviation_interval,
    t_interval,
)

Verdict = Literal["better", "worse", "equal", "can't tell", "diverged"]
MIN_SEEDS = 5
"""Seeds that a confirmatory contrast takes."""


class Verdicts(NamedTuple):
    """Verdicts on the contrasts of families, and Holm's p-values of difference and of equality; arrays of one shape."""

    verdict: np.ndarray
    p_value: Float[np.ndarray, "*studies M"]
    p_value_of_equality: Float[np.ndarray, "*studies M"]


class Judgement(NamedTuple):
    """The verdict on one contrast of a confirmatory family of M.

    ``p_value`` and ``p_value_of_equality`` are adjusted by Holm. ``interval`` is the difference with a t interval at
    level 0.05 / M: the intervals of the whole family hold at once with a chance of 95 % (Bonferroni). It may reach over
    0 where Holm, which finds more, does not. ``seeds_needed`` is there when the verdict is "can't tell", for a new
    study; its interval is what the measured standard deviation leaves open.
    """

    verdict: Verdict
    smallest_difference: float
    p_value: float
    p_value_of_equality: float
    interval: Estimate | None
    seeds_needed: Estimate | None


class Contrast(NamedTuple):
    """One arm against the baseline. ``seeds`` is ``None`` when either diverged at ``num_diverged`` of the seeds.

    ``detectable`` is the true difference that would have been found with a chance of 80 % at the standard deviation
    measured, with the interval that the latter's leaves open. ``judgement`` is ``None`` for an exploratory contrast.
    """

    arm: str
    seeds: PairedDifference | None
    num_diverged: int
    num_seeds: int
    detectable: Estimate | None
    judgement: Judgement | None

    def sentence(self) -> str:
        """The verdict in words, or why there is none."""
        if self.num_diverged:
            return f"diverged at {self.num_diverged} of {self.num_seeds} seeds"
        if self.judgement is None:
            return "exploratory: no verdict"
        if self.judgement.verdict == "equal":
            return f"equal within {self.judgement.smallest_difference:g}"
        needed = self.judgement.seeds_needed
        if needed is not None:
            return f"can't tell: needs {needed.value:,.0f} seeds ({needed.low:,.0f} to {needed.high:,.0f})"
        return self.judgement.verdict

    def to_mapping(self) -> dict[str, Any]:
        """Nested plain values for a JSON file."""
        return _plain(self) | {"sentence": self.sentence()}


def require_confirmable(confirmatory: Sequence[str], num_seeds: int, smallest_difference: float | None) -> None:
    """Raise ``ValueError``, before the first run, when a declared family could not be judged."""
    if not confirmatory:
        return
    named = ", ".join(confirmatory)
    if len(set(confirmatory)) < len(confirmatory):
        raise ValueError(f"confirmatory={named} names an arm twice; name each once")
    if num_seeds < MIN_SEEDS:
        raise ValueError(
            f"confirmatory={named} takes at least {MIN_SEEDS} seeds, not {num_seeds}; add seeds or leave it empty"
        )
    if smallest_difference is None or smallest_difference <= 0:
        raise ValueError(
            f"confirmatory={named} has no verdict with smallest_difference={smallest_difference}; "
            "declare the smallest difference that matters, above 0"
        )


def compare_arms(
    metric: Mapping[str, Float[np.ndarray, "S"]],
    baseline: str,
    confirmatory: Sequence[str] = (),
    smallest_difference: float | None = None,
) -> list[Contrast]:
    """Every other arm against the baseline, paired by seed; those named in ``confirmatory`` are judged together.

    ``metric`` has one value a seed for each arm, in the same order of seeds, lower is better; nan where a run diverged.
    A verdict is "equal" when the difference is shown to be smaller than ``smallest_difference``, even if it is shown
    not to be 0; else "better" or "worse" when it is shown not to be 0, else "can't tell". Among the judged contrasts
    the chance of any "better" or "worse" where there is no difference is at most 5 %, and that of any "equal" where the
    difference is ``smallest_difference`` or more is at most 5 %: each kind of p-value is adjusted by Holm over the
    family. An arm that diverged stays in the family, with p-values of 1.

    Raises ``ValueError`` for an unknown arm, arms with other numbers of seeds, fewer than two seeds, and as
    :func:`require_confirmable` does.
    """
    _require_comparable(metric, baseline, confirmatory)
    num_seeds = len(metric[baseline])
    require_confirmable(confirmatory, num_seeds, smallest_difference)
    finite = {arm: np.where(np.isfinite(values), values, np.nan) for arm, values in metric.items()}
    judged = {}
    if confirmatory and smallest_difference is not None:
        differences = np.stack([finite[arm] - finite[baseline] for arm in confirmatory])
        judged = dict(zip(confirmatory, _judge(differences, smallest_difference), strict=True))
    contrasts = []
    for arm in (name for name in metric if name != baseline):
        num_diverged = int(np.isnan(finite[arm] - finite[baseline]).sum())
        seeds = None if num_diverged else paired_difference(finite[arm], finite[baseline])
        level = LEVEL / len(confirmatory) if arm in confirmatory else LEVEL
        detectable = None if seeds is None else _detectable(seeds, level)
        contrasts.append(Contrast(arm, seeds, num_diverged, num_seeds, detectable, judged.get(arm)))
    return contrasts


def difference_of_differences(
    metric: Mapping[str, Float[np.ndarray, "S"]], changed: tuple[str, str], plain: tuple[str, str]
) -> PairedDifference | None:
    """How much the difference between two arms depends on a change: (a - b) of ``changed`` less (a - b) of ``plain``.

    Paired by seed: every seed gives one such number, and the t interval is that of their mean. The correlation is that
    of the two differences over the seeds. ``None`` where one of the four arms diverged at a seed. An interval that
    leaves 0 out is no verdict: each misses the true value in 1 of 20 studies.

    Raises ``ValueError`` for an unknown arm, arms with other numbers of seeds, and fewer than two seeds.
    """
    _require_arms(metric, (*changed, *plain))
    _require_paired({arm: metric[arm] for arm in (*changed, *plain)}, plain[1])
    finite = {arm: np.where(np.isfinite(values), values, np.nan) for arm, values in metric.items()}
    with_change, without = (finite[first] - finite[second] for first, second in (changed, plain))
    if np.isnan(with_change - without).any():
        return None
    return paired_difference(with_change, without)


def holm(p_values: Float[np.ndarray, "*studies M"]) -> Float[np.ndarray, "*studies M"]:
    """Adjusted p-values of each family of M: rejecting those at most 0.05 errs anywhere with a chance of at most 5 %.

    The k-th smallest becomes the largest of (M - j + 1) p_(j) over j <= k, at most 1, whatever the dependence between
    the tests (Holm 1979, "A simple sequentially rejective multiple test procedure").
    """
    order = np.argsort(p_values, axis=-1)
    factors = np.arange(p_values.shape[-1], 0, -1)
    steps = np.maximum.accumulate(np.take_along_axis(p_values, order, axis=-1) * factors, axis=-1)
    adjusted = np.empty_like(steps)
    np.put_along_axis(adjusted, order, np.minimum(steps, 1.0), axis=-1)
    return adjusted


def verdicts(differences: Float[np.ndarray, "*studies M S"], smallest_difference: float) -> Verdicts:
    """The verdict on each contrast of each family of M, from paired differences over S seeds.

    A contrast with a difference that is nan is "diverged", and counts in its family with p-values of 1.
    """
    diverged = np.isnan(differences).any(axis=-1)
    finite = np.where(np.expand_dims(diverged, -1), 0.0, differences)
    different = holm(np.where(diverged, 1.0, difference_p_values(finite)))
    equal = holm(np.where(diverged, 1.0, equality_p_values(finite, smallest_difference)))
    direction = np.where(finite.mean(axis=-1) < 0, "better", "worse")
    cases = [diverged, equal <= LEVEL, different <= LEVEL]
    return Verdicts(np.select(cases, ["diverged", "equal", direction], "can't tell"), different, equal)


def _judge(differences: Float[np.ndarray, "M S"], smallest_difference: float) -> list[Judgement]:
    judged, level = verdicts(differences, smallest_difference), LEVEL / len(differences)
    judgements = []
    for row, verdict, different, equal in zip(differences, *(column.tolist() for column in judged), strict=True):
        interval = None if verdict == "diverged" else t_interval(row, level)
        needed = _seeds_needed(row, smallest_difference, level) if verdict == "can't tell" else None
        judgements.append(Judgement(verdict, smallest_difference, different, equal, interval, needed))
    return judgements


def _detectable(seeds: PairedDifference, level: float) -> Estimate:
    spread = standard_deviation_interval(seeds.standard_deviation, seeds.num_seeds)
    return Estimate(*(minimum_detectable_difference(one, seeds.num_seeds, level) for one in spread))


def _seeds_needed(differences: Float[np.ndarray, "S"], smallest_difference: float, level: float) -> Estimate:
    spread = standard_deviation_interval(float(differences.std(ddof=1)), len(differences))
    return Estimate(*(seeds_for_verdict(one, smallest_difference, level) for one in spread))


def _require_comparable(
    metric: Mapping[str, Float[np.ndarray, "S"]], baseline: str, confirmatory: Sequence[str]
) -> None:
    _require_arms(metric, (baseline, *confirmatory))
    if baseline in confirmatory:
        raise ValueError(
            f"confirmatory names the baseline {baseline!r}, which is not compared with itself; leave it out"
        )
    _require_paired(metric, baseline)


def _require_arms(metric: Mapping[str, Float[np.ndarray, "S"]], arms: Sequence[str]) -> None:
    for arm in arms:
        if arm not in metric:
            raise ValueError(f"{arm!r} is no arm with results; {nearest(arm, metric)}")


def _require_paired(metric: Mapping[str, Float[np.ndarray, "S"]], baseline: str) -> None:
    num_seeds = len(metric[baseline])
    for arm, values in metric.items():
        if len(values) != num_seeds:
            raise ValueError(
                f"arm {arm} has {len(values)} seeds and {baseline} {num_seeds}; "
                "give one value a seed, nan where a run diverged"
            )
    if num_seeds < 2:
        raise ValueError(f"{num_seeds} seed says nothing about other seeds; train with at least 2")


def _plain(value: Any) -> Any:
    return {name: _plain(part) for name, part in value._asdict().items()} if hasattr(value, "_asdict") else value

"""Studies with a known truth: how often their verdicts are wrong, and how often right.

Losses of an arm are a part that its seed shares with the baseline, the true difference, and noise of its own, of which
paired differences have a standard deviation of 1. Everything is counted with :func:`gatelab.study.contrasts.verdicts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.stats import binomtest

from gatelab.study.contrasts import Verdicts, verdicts
from gatelab.study.statistics import LEVEL, Estimate

SEED_EFFECT = 3.0

Noise = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Noise that Student's t-test is exact for."""
    return rng.standard_normal(shape)


def heavy_tails(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Student's distribution with 3 degrees of freedom: now and then a seed far from the others."""
    return rng.standard_t(3, shape) / math.sqrt(3)


def skewed(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """An exponential distribution: a bad seed is worse than a good one is good."""
    return rng.standard_exponential(shape) - 1


def skewed_arms(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """As ``skewed``, but for a baseline whose noise is normal: paired differences are skewed too."""
    noise = skewed(rng, shape)
    noise[:, 0] = normal(rng, noise[:, 0].shape)
    return noise


class Case(NamedTuple):
    """Studies whose arms differ from the baseline by ``truth``, and what is counted: a verdict's kind, in any arm."""

    name: str
    truth: tuple[float, ...]
    counted: str
    smallest_difference: float = 2.5
    num_seeds: int = 5
    noise: Noise = normal


NO_DIFFERENCE = (
    Case("1 contrast", (0.0,), "different"),
    Case("3 contrasts", (0.0, 0.0, 0.0), "different"),
    Case("3 contrasts, 10 seeds", (0.0, 0.0, 0.0), "different", num_seeds=10),
    Case("3 contrasts, heavy tails", (0.0, 0.0, 0.0), "different", noise=heavy_tails),
    Case("3 contrasts, skewed", (0.0, 0.0, 0.0), "different", noise=skewed),
)
JUST_TOO_LARGE = (
    Case("1 contrast", (2.5,), "equal"),
    Case("3 contrasts", (2.5, -2.5, 2.5), "equal"),
    Case("3 contrasts, 10 seeds", (1.5, -1.5, 1.5), "equal", smallest_difference=1.5, num_seeds=10),
    Case("3 contrasts, heavy tails", (2.5, -2.5, 2.5), "equal", noise=heavy_tails),
    Case("3 contrasts, skewed", (2.5, -2.5, 2.5), "equal", noise=skewed),
)
BEYOND_THE_ASSUMPTIONS = (
    Case("1 contrast, skewed arm", (0.0,), "different", noise=skewed_arms),
    Case("1 contrast, skewed arm", (2.5,), "equal", noise=skewed_arms),
)
"""Where Student's t-test is known to be only nearly right: the mean of a skewed arm looks better than it is."""


def differences(case: Case, num_studies: int, seed: int) -> Float[np.ndarray, "N M S"]:
    """Paired differences of ``num_studies`` studies, every arm against the baseline that they share."""
    rng = np.random.default_rng(seed)
    shared = SEED_EFFECT * rng.standard_normal((num_studies, 1, case.num_seeds))
    losses = shared + case.noise(rng, (num_studies, len(case.truth) + 1, case.num_seeds)) / math.sqrt(2)
    losses[:, 1:] += np.array(case.truth)[:, None]
    return losses[:, 1:] - losses[:, :1]


def judge(case: Case, num_studies: int, seed: int) -> Verdicts:
    """The verdicts of ``num_studies`` studies."""
    return verdicts(differences(case, num_studies, seed), case.smallest_difference)


def count_any(case: Case, num_studies: int, seed: int) -> int:
    """Studies in which at least one contrast is shown to be what the case counts."""
    judged = judge(case, num_studies, seed)
    p_values = judged.p_value if case.counted == "different" else judged.p_value_of_equality
    return int((p_values <= LEVEL).any(axis=-1).sum())


def rate(count: int, number: int) -> Estimate:
    """A share with its exact interval (Clopper and Pearson 1934)."""
    interval = binomtest(count, number).proportion_ci(1 - LEVEL, method="exact")
    return Estimate(count / number, float(interval.low), float(interval.high))


def simulate(num_studies: int = 10_000, seed: int = 0) -> list[dict[str, Any]]:
    """One row for each case: how often a study had a false verdict, with its interval, beside the stated rate."""
    rows = []
    for case in (*NO_DIFFERENCE, *JUST_TOO_LARGE, *BEYOND_THE_ASSUMPTIONS):
        count = count_any(case, num_studies, seed)
        found = rate(count, num_studies)
        rows.append(
            {
                "case": case.name,
                "seeds": case.num_seeds,
                "noise": case.noise.__name__,
                "truth": list(case.truth),
                "false_verdict": case.counted,
                "false": count,
                "of": num_studies,
                "stated": LEVEL,
                **found._asdict(),
            }
        )
    return rows

"""What a number of seeds can tell: detectable differences, and the seeds that a verdict takes."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import root_scalar
from scipy.special import gammainc, gammaincinv, nctdtr, ndtr, stdtrit

from gatelab.study.statistics import LEVEL

POWER = 0.8
"""Chance of finding what is there that a detectable difference is computed for."""

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


def power_of_difference(difference: float, standard_deviation: float, num_seeds: int, level: float = LEVEL) -> float:
    """Chance that the two-sided paired t-test at ``level`` finds a true ``difference``.

    P(|T| > t), T noncentral with S - 1 degrees of freedom and noncentrality difference sqrt(S) / standard deviation
    (Johnson, Kotz and Balakrishnan 1995, chapter 31). ``standard_deviation`` is that of the paired differences, above
    0.
    """
    degrees, shift = num_seeds - 1, difference * math.sqrt(num_seeds) / standard_deviation
    bound = stdtrit(degrees, 1 - level / 2)
    return float(1 - nctdtr(degrees, shift, bound) + nctdtr(degrees, shift, -bound))


def power_of_equality(
    smallest_difference: float,
    standard_deviation: float,
    num_seeds: int,
    level: float = LEVEL,
    true_difference: float = 0.0,
) -> float:
    """Chance that the two one-sided t-tests at ``level`` show a true difference to lie within ``smallest_difference``.

    The exact power (Phillips 1990, "Power of the two one-sided tests procedure in bioequivalence"), as the expectation
    over the measured standard deviation u sigma, u^2 (S - 1) chi-square, of P(|mean| < d - t u sigma / sqrt(S)),
    to about 1e-5. ``standard_deviation`` is that of the paired differences, above 0.
    """
    degrees, scale = num_seeds - 1, standard_deviation / math.sqrt(num_seeds)
    bound = stdtrit(degrees, 1 - level)
    widest = (smallest_difference / (bound * scale)) ** 2
    share = gammainc(degrees / 2, degrees * widest / 2)
    quantiles = share * (_NODES + 1) / 2
    room = smallest_difference - bound * scale * np.sqrt(2 * gammaincinv(degrees / 2, quantiles) / degrees)
    inside = ndtr((room - true_difference) / scale) - ndtr((-room - true_difference) / scale)
    return float(share * (_WEIGHTS @ inside) / 2)


def minimum_detectable_difference(standard_deviation: float, num_seeds: int, level: float = LEVEL) -> float:
    """The true difference that the paired t-test at ``level`` finds with a chance of ``POWER``.

    With a family of M contrasts, ``level`` / M is what Holm asks of the first. ``standard_deviation`` is that of the
    paired differences; the result is proportional to it.
    """
    if standard_deviation == 0:
        return 0.0

    def lack(difference: float) -> float:
        return power_of_difference(difference, 1.0, num_seeds, level) - POWER

    upper = 1.0
    while lack(upper) < 0:
        upper *= 2
    return standard_deviation * root_scalar(lack, bracket=(0.0, upper)).root


def seeds_for_verdict(standard_deviation: float, smallest_difference: float, level: float = LEVEL) -> int:
    """The least number of seeds at which a verdict must come, whatever the measured difference.

    "Different" needs |mean| > t(1 - level / 2) s / sqrt(S), "equal within d" needs |mean| < d - t(1 - level) s /
    sqrt(S), both with S - 1 degrees of freedom. Nothing is left between the two once the half-widths add up to d or
    less. The next study's standard deviation will be another one, so this is an estimate, and for a new study with
    fresh seeds: adding seeds to a study until its verdict comes finds more than the stated rate of differences that
    are not there.
    """

    def suffices(num_seeds: int) -> bool:
        quantiles = stdtrit(num_seeds - 1, 1 - level / 2) + stdtrit(num_seeds - 1, 1 - level)
        return bool(quantiles * standard_deviation <= smallest_difference * math.sqrt(num_seeds))

    high = 2
    while not suffices(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return max(high, 2)

"""What a number of seeds can tell, against simulation, loops and published figures."""

import math

import numpy as np
import pytest
from scipy.stats import t as student

from gatelab.study.contrasts import verdicts
from gatelab.study.power import (
    minimum_detectable_difference,
    power_of_difference,
    power_of_equality,
    seeds_for_verdict,
)
from gatelab.study.statistics import difference_p_values, equality_p_values

STUDIES = 20_000


def simulated(true_difference, standard_deviation, num_seeds):
    noise = np.random.default_rng(7).standard_normal((STUDIES, num_seeds))
    return true_difference + standard_deviation * noise


@pytest.mark.parametrize(("difference", "deviation", "seeds", "level"), [(0.4, 0.3, 5, 0.05), (-0.3, 0.1, 3, 0.05 / 3)])
def test_power_of_a_difference_is_how_often_it_is_found(difference, deviation, seeds, level):
    found = (difference_p_values(simulated(difference, deviation, seeds)) <= level).mean()
    assert 0.2 < found < 0.8
    assert power_of_difference(difference, deviation, seeds, level) == pytest.approx(found, abs=0.012)


@pytest.mark.parametrize(
    ("smallest", "deviation", "seeds", "truth"), [(0.2, 0.15, 5, 0.0), (0.1, 0.1, 10, 0.0), (0.2, 0.1, 5, -0.05)]
)
def test_power_of_equality_is_how_often_it_is_shown(smallest, deviation, seeds, truth):
    found = (equality_p_values(simulated(truth, deviation, seeds), smallest) <= 0.05).mean()
    assert 0.2 < found < 0.95
    power = power_of_equality(smallest, deviation, seeds, true_difference=truth)
    assert power == pytest.approx(found, abs=0.012)


def test_power_without_an_effect_is_the_stated_rate():
    assert power_of_difference(0.0, 0.3, 5) == pytest.approx(0.05, abs=1e-9)
    assert power_of_equality(1.0, 0.01, 5, true_difference=1.0) == pytest.approx(0.05, abs=1e-5)


@pytest.mark.parametrize(
    ("seeds", "level", "expected"),
    [(5, 0.05, 1.681997), (5, 0.05 / 3, 2.291649), (3, 0.05, 3.264044), (10, 0.05, 0.996002)],
)
def test_detectable_differences_are_those_of_statsmodels(seeds, level, expected):
    """Effect sizes of ``statsmodels.stats.power.TTestPower().solve_power`` at a power of 0.8."""
    assert minimum_detectable_difference(1.0, seeds, level) == pytest.approx(expected, abs=2e-6)
    assert minimum_detectable_difference(0.03, seeds, level) == pytest.approx(0.03 * expected, abs=1e-6)


def test_nothing_varies_and_everything_is_detectable():
    assert minimum_detectable_difference(0.0, 5) == 0
    assert seeds_for_verdict(0.0, 0.01) == 2


@pytest.mark.parametrize(("ratio", "level"), [(0.4, 0.05), (1.0, 0.05), (1.7, 0.05 / 2), (0.1, 0.05 / 3)])
def test_seeds_for_a_verdict_are_found_by_trying_each_number(ratio, level):
    number = 2
    while True:
        quantiles = student.ppf(1 - level / 2, number - 1) + student.ppf(1 - level, number - 1)
        if quantiles * ratio / math.sqrt(number) <= 1:
            break
        number += 1
    assert seeds_for_verdict(0.02 * ratio, 0.02, level) == number


def test_enough_seeds_leave_no_mean_without_a_verdict():
    number = seeds_for_verdict(0.03, 0.02)
    for seeds, may_stay_open in ((number, False), (number - 1, True)):
        values = np.random.default_rng(8).standard_normal(seeds)
        values = 0.03 * (values - values.mean()) / values.std(ddof=1)
        means = np.linspace(-0.04, 0.04, 801)
        found = verdicts((values + means[:, None])[:, None, :], 0.02).verdict
        assert ("can't tell" in found) == may_stay_open
        assert {"better", "worse", "equal"} <= set(found.flatten().tolist())


def test_seeds_for_a_verdict_grow_with_the_square():
    assert seeds_for_verdict(1.0, 0.01) == pytest.approx(1e4 * (1.959964 + 1.644854) ** 2, abs=3)

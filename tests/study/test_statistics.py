"""Intervals over seeds, the paired bootstrap over documents, sensitivity to the learning rate."""

import math

import numpy as np
import pytest
from student_by_loops import mean_and_deviation, student_quantile, student_tail

from gatelab.study.statistics import (
    DocumentScores,
    average_over_seeds,
    compare_on_documents,
    correlation,
    difference_p_values,
    equality_p_values,
    learning_rate_sensitivity,
    paired_difference,
    standard_deviation_interval,
    t_interval,
)

ARM = np.array([3.41, 3.38, 3.47, 3.36, 3.44, 3.39])
BASELINE = np.array([3.45, 3.44, 3.46, 3.41, 3.52, 3.40])


def scores(rng, num_documents=200, shift=0.0, spread=0.3):
    tokens = rng.integers(20, 200, num_documents).astype(float)
    nats = tokens * (3.0 + shift + spread * rng.standard_normal(num_documents))
    return DocumentScores(nats, tokens, tokens * 3.7)


def test_a_paired_difference_equals_loops_over_students_density():
    differences = [a - b for a, b in zip(ARM.tolist(), BASELINE.tolist(), strict=True)]
    mean, deviation = mean_and_deviation(differences)
    half = student_quantile(5, 0.975) * deviation / math.sqrt(6)
    found = paired_difference(ARM, BASELINE)
    assert found.num_seeds == 6 and found.standard_deviation == pytest.approx(deviation, rel=1e-12)
    assert found.difference == pytest.approx((mean, mean - half, mean + half), rel=1e-5)
    assert found.p_value == pytest.approx(2 * student_tail(5, abs(mean) / (deviation / math.sqrt(6))), rel=1e-5)


def test_pairing_is_by_seed():
    """Shuffled seeds leave the mean and widen the interval."""
    shuffled = paired_difference(ARM, BASELINE[::-1])
    paired = paired_difference(ARM, BASELINE)
    assert shuffled.difference.value == pytest.approx(paired.difference.value)
    assert shuffled.standard_deviation > 1.3 * paired.standard_deviation


def test_p_values_and_intervals_agree():
    rng = np.random.default_rng(1)
    for differences in rng.standard_normal((200, 5)) + 0.9:
        interval = t_interval(differences)
        assert (difference_p_values(differences) <= 0.05) == (not interval.low <= 0 <= interval.high)
        narrow = t_interval(differences, level=0.1)
        assert (equality_p_values(differences, 1.7) <= 0.05) == (max(-narrow.low, narrow.high) < 1.7)


def test_equality_is_two_one_sided_tests_by_loops():
    differences = (ARM - BASELINE).tolist()
    mean, deviation = mean_and_deviation(differences)
    error = deviation / math.sqrt(6)
    for smallest in (0.02, 0.05, 0.2):
        below, above = (mean + smallest) / error, (smallest - mean) / error
        expected = max(student_tail(5, below), student_tail(5, above))
        assert equality_p_values(np.array(differences), smallest) == pytest.approx(expected, rel=1e-4)


def test_many_studies_at_once_equal_one_by_one():
    rows = np.random.default_rng(2).standard_normal((3, 7, 5))
    for function in (difference_p_values, lambda x: equality_p_values(x, 0.4)):
        together = function(rows)
        assert together.shape == (3, 7)
        assert together[2, 4] == function(rows[2, 4]) and together[0, 6] == function(rows[0, 6])


def test_arms_that_are_bit_equal_differ_by_nothing():
    found = paired_difference(ARM, ARM.copy())
    assert found.difference == (0, 0, 0) and found.p_value == 1
    assert equality_p_values(np.zeros(5), 0.01) == 0
    assert difference_p_values(np.full(5, 0.25)) == 0 and equality_p_values(np.full(5, 0.25), 0.25) == 1


def test_correlation_equals_its_definition():
    a, b = ARM.tolist(), BASELINE.tolist()
    mean_a, mean_b = sum(a) / 6, sum(b) / 6
    covariance = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    r = covariance / math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))
    low, high = (math.tanh(math.atanh(r) + sign * 1.959964 / math.sqrt(3)) for sign in (-1, 1))
    assert correlation(ARM, BASELINE) == pytest.approx((r, low, high), rel=1e-6)


def test_correlation_says_what_few_or_equal_seeds_leave_open():
    assert correlation(ARM[:3], BASELINE[:3])[1:] == (-1, 1)
    assert correlation(ARM, np.full(6, 3.0)) is None
    assert correlation(ARM, -2 * ARM) == pytest.approx((-1, -1, -1))


def test_correlation_intervals_cover_the_truth():
    rng = np.random.default_rng(4)
    shared, own = rng.standard_normal((1, 2000, 8)), rng.standard_normal((2, 2000, 8))
    arms = 2 * shared + own
    found = [correlation(a, b) for a, b in zip(*arms, strict=True)]
    assert 1870 < sum(one.low <= 0.8 <= one.high for one in found) < 1930


def test_a_standard_deviation_is_known_to_a_factor():
    _, low, high = standard_deviation_interval(1.0, 5)
    assert (low, high) == pytest.approx((0.5991, 2.8736), abs=1e-4)
    measured = np.random.default_rng(5).standard_normal((2000, 5)).std(axis=1, ddof=1)
    assert 1870 < sum(low * one <= 1 <= high * one for one in measured) < 1930


def test_sensitivity_equals_loops():
    losses = np.array([[3.9, 3.8], [3.2, 3.3], [3.4, np.nan], [9.7, np.inf], [5.1, 4.8]])
    expected = []
    for seed in range(2):
        counted = [min(row[seed], 5.0) if math.isfinite(row[seed]) else 5.0 for row in losses.tolist()]
        expected.append(sum(loss - min(counted) for loss in counted) / len(counted))
    assert learning_rate_sensitivity(losses, 5.0) == pytest.approx(expected)


def test_sensitivity_at_its_ends():
    losses = np.array([[3.0, np.nan, 3.0], [3.0, np.nan, np.nan]])
    worst = math.log(97)
    assert learning_rate_sensitivity(losses, worst) == pytest.approx([0, 0, (worst - 3) / 2])
    with pytest.raises(ValueError, match=r"1 learning rates with initial_loss=4\.2 have no sensitivity; give losses"):
        learning_rate_sensitivity(np.array([[3.0]]), 4.2)
    with pytest.raises(ValueError, match="initial_loss=nan have no sensitivity"):
        learning_rate_sensitivity(np.array([[3.0], [3.1]]), math.nan)


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        (ARM[:5], "5 seeds of one arm can't be paired with 6 of the other; train both"),
        (np.append(ARM[:5], np.nan), "a run that diverged has no difference to the other arm"),
    ],
)
def test_what_has_no_paired_difference_is_refused(arm, message):
    with pytest.raises(ValueError, match=message):
        paired_difference(arm, BASELINE)


def test_one_seed_is_refused():
    with pytest.raises(ValueError, match="1 seed says nothing about other seeds; train with at least 2"):
        paired_difference(ARM[:1], BASELINE[:1])


def test_point_estimates_equal_their_definitions():
    rng = np.random.default_rng(3)
    baseline = scores(rng)
    arm = baseline._replace(nats=baseline.nats * 0.95)
    result = compare_on_documents(arm, baseline)
    tokens, num_bytes = baseline.tokens.sum(), baseline.bytes.sum()
    expected = math.exp(arm.nats.sum() / tokens) / math.exp(baseline.nats.sum() / tokens) - 1
    assert result.relative_perplexity.value == pytest.approx(expected, rel=1e-12)
    bits = (arm.nats.sum() - baseline.nats.sum()) / math.log(2) / num_bytes
    assert result.bits_per_byte.value == pytest.approx(bits, rel=1e-12)
    assert result.relative_perplexity.low < expected < result.relative_perplexity.high < 0


def test_seeds_are_averaged_to_a_geometric_mean_of_ratios():
    rng = np.random.default_rng(6)
    baseline = scores(rng)
    seeds = [baseline._replace(nats=baseline.nats * factor) for factor in (0.93, 0.99, 1.02)]
    ratios = [1 + compare_on_documents(seed, baseline).relative_perplexity.value for seed in seeds]
    found = compare_on_documents(average_over_seeds(seeds), baseline).relative_perplexity.value
    assert 1 + found == pytest.approx(math.prod(ratios) ** (1 / 3), rel=1e-12)
    with pytest.raises(ValueError, match="scored on different documents"):
        average_over_seeds([baseline, scores(rng)])


def test_intervals_cover_the_truth_at_the_stated_rate():
    """Arms whose documents differ by independent noise: the true difference of their mean loss is zero."""
    covered = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        baseline = scores(rng)
        noise = baseline.tokens * 0.1 * rng.standard_normal(len(baseline.tokens))
        interval = compare_on_documents(baseline._replace(nats=baseline.nats + noise), baseline, 400).bits_per_byte
        covered += interval.low <= 0 <= interval.high
    assert 178 <= covered <= 199


def test_an_arm_against_itself_is_exactly_equal():
    baseline = scores(np.random.default_rng(0))
    assert compare_on_documents(baseline, baseline).relative_perplexity == (0.0, 0.0, 0.0)


def test_other_documents_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="scored on different documents"):
        compare_on_documents(scores(rng), scores(rng))

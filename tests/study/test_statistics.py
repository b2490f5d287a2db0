"""The paired bootstrap over documents."""

import math

import numpy as np
import pytest

from gatelab.study.statistics import DocumentScores, compare_on_documents


def scores(rng, num_documents=200, shift=0.0, spread=0.3):
    tokens = rng.integers(20, 200, num_documents).astype(float)
    nats = tokens * (3.0 + shift + spread * rng.standard_normal(num_documents))
    return DocumentScores(nats, tokens, tokens * 3.7)


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

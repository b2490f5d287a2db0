"""Largest activations and gate scores against loops over their entries."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gatelab.diagnose.activations import largest_activation
from gatelab.diagnose.gate_scores import HISTOGRAM_BINS, gate_statistics

B, T, D = 3, 17, 41


@given(
    sample=st.integers(0, B - 1),
    token=st.integers(0, T - 1),
    channel=st.integers(0, D - 1),
    sign=st.sampled_from([-1, 1]),
)
def test_the_largest_value_is_found_where_it_is(sample: int, token: int, channel: int, sign: int) -> None:
    hidden = torch.randn(B, T, D, generator=torch.Generator().manual_seed(token), dtype=torch.float64)
    hidden[sample, token, channel] = sign * 20.5
    found = largest_activation(hidden)
    assert (found.value, found.token, found.channel) == (20.5, token, channel)
    magnitudes = sorted(abs(value) for value in hidden.flatten().tolist())
    assert found.median == pytest.approx(magnitudes[(len(magnitudes) - 1) // 2], rel=1e-6)


def test_bfloat16_states_are_measured_in_float32() -> None:
    hidden = torch.tensor([[[1.0, -3.0], [2.0, 0.5]]], dtype=torch.bfloat16)
    assert tuple(largest_activation(hidden)) == (3.0, 0, 1, 1.0)


def make_scores(N: int, C: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return (2.5 * torch.randn(B, T, N, C, generator=generator, dtype=torch.float64)).sigmoid().to(dtype)


@pytest.mark.parametrize(
    ("N", "C"), [(6, 10), (6, 1), (1, 10), (1, 1)], ids=["elementwise", "headwise", "shared", "single"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_statistics_are_those_of_a_loop(N: int, C: int, dtype: torch.dtype) -> None:
    scores = make_scores(N, C, dtype)
    found = gate_statistics(scores)
    values = scores.float().flatten().tolist()
    assert found.mean == pytest.approx(statistics.fmean(values), abs=5e-6)
    assert found.below_tenth == pytest.approx(sum(value < 0.1 for value in values) / len(values), abs=1e-6)
    assert found.above_nine_tenths == pytest.approx(sum(value > 0.9 for value in values) / len(values), abs=1e-6)
    assert 0 < found.below_tenth < 0.5 > found.above_nine_tenths > 0
    by_head = [statistics.fmean(scores[:, :, head].float().flatten().tolist()) for head in range(N)]
    assert found.mean_by_head == pytest.approx(by_head, abs=5e-6)
    histogram = [0] * HISTOGRAM_BINS
    for value in values:
        histogram[min(int(value * HISTOGRAM_BINS), HISTOGRAM_BINS - 1)] += 1
    assert found.histogram == histogram and sum(found.histogram) == len(values)


def test_values_outside_the_unit_interval_are_in_the_end_bins() -> None:
    """Additive, SiLU, 2 sigmoid and softplus scores leave [0, 1]; means are of the values as they are."""
    found = gate_statistics(torch.tensor([-3.0, -0.2, 0.0, 1.0, 1.7, 5.0]).view(1, 3, 2, 1))
    assert found.histogram == [3, *[0] * 18, 3]
    assert found.mean == pytest.approx(0.75) and found.mean_by_head == pytest.approx([-1.3 / 3, 5.8 / 3])
    assert (found.below_tenth, found.above_nine_tenths) == (0.5, 0.5)


def test_an_input_independent_gate_counts_once() -> None:
    found = gate_statistics(torch.tensor([[0.25, 0.75, 0.5]]).view(1, 1, 3, 1))
    assert (found.mean, found.mean_by_head, sum(found.histogram)) == (0.5, [0.25, 0.75, 0.5], 3)


def test_more_scores_than_float32_can_count() -> None:
    """A float32 bin stops at 2^24, which a measurement of a model of the paper's size exceeds."""
    assert gate_statistics(torch.full((1, 17, 1000, 1000), 0.5)).histogram[10] == 17_000_000

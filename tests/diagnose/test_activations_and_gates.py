"""Hidden states and gate scores against loops over their entries."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gatelab.diagnose.activations import HiddenStatistics, HiddenTotals, median_of
from gatelab.diagnose.gate_scores import HISTOGRAM_BINS, GateStatistics, GateTotals

B, T, D = 3, 17, 41


def hidden_statistics(*batches: Tensor, real: Tensor | None = None) -> HiddenStatistics:
    totals = HiddenTotals()
    for hidden in batches:
        totals.add(hidden, real)
    found = totals.statistics()
    assert found is not None
    return found


def make_hidden(seed: int = 0) -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(
    sample=st.integers(0, B - 1),
    token=st.integers(0, T - 1),
    channel=st.integers(0, D - 1),
    sign=st.sampled_from([-1, 1]),
)
def test_the_largest_value_is_found_where_it_is(sample: int, token: int, channel: int, sign: int) -> None:
    hidden = make_hidden(token)
    hidden[sample, token, channel] = sign * 20.5
    assert tuple(hidden_statistics(hidden).largest[0]) == (20.5, token, channel)


def loop_statistics(rows: list[Tensor]) -> dict[str, float]:
    """The figures over samples (T D) of real tokens."""
    tokens = [token.tolist() for row in rows for token in row]
    magnitudes = [sorted(abs(value) for value in row.flatten().tolist()) for row in rows]
    median = statistics.fmean(one[(len(one) - 1) // 2] for one in magnitudes)
    maxima = [max(abs(token[channel]) for token in tokens) for channel in range(D)]
    kurtosis = []
    for token in tokens:
        mean = statistics.fmean(token)
        variance = statistics.fmean((value - mean) ** 2 for value in token)
        if variance:
            kurtosis.append(statistics.fmean((value - mean) ** 4 for value in token) / variance**2)
    return {
        "median": median,
        "share_above_100": sum(one > 100 for one in maxima) / D,
        "share_above_1000_medians": sum(one > 1000 * median for one in maxima) / D,
        "kurtosis": statistics.fmean(kurtosis),
        "residual_norm": statistics.fmean(math.sqrt(sum(value**2 for value in token)) for token in tokens),
        "tokens": len(tokens),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_padded", [True, False])
def test_hidden_statistics_are_those_of_a_loop(dtype: torch.dtype, is_padded: bool) -> None:
    hidden = make_hidden()
    hidden[1, 4, [7, 11]] = torch.tensor([-2500.0, 150.0]).double()
    hidden[2, 9, 7] = 180.0
    hidden[0, 16] = 0.25
    hidden = hidden.to(dtype)
    real = torch.arange(T) >= torch.tensor([[0], [3], [9]])
    rows = [hidden[b][real[b]] if is_padded else hidden[b] for b in range(B)]
    poisoned = hidden.masked_fill(~real[..., None], math.nan) if is_padded else hidden
    found = hidden_statistics(poisoned, real=real if is_padded else None)
    expected = loop_statistics([row.double() for row in rows])
    assert expected["share_above_100"] == 2 / D and expected["share_above_1000_medians"] == 1 / D
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-5), name
    assert [tuple(one)[1:] for one in found.largest] == [(4, 7), (9, 7), (4, 11)]
    assert found.value == pytest.approx(2500, rel=1e-2) and found.ratio == pytest.approx(found.value / found.median)


def test_batches_of_hidden_states_add_up() -> None:
    hidden = make_hidden()
    whole, parts = hidden_statistics(hidden), hidden_statistics(hidden[:1], hidden[1:])
    assert parts.largest == whole.largest and parts[1:] == pytest.approx(whole[1:])


def test_hidden_states_without_a_real_token_or_spread() -> None:
    totals = HiddenTotals()
    totals.add(make_hidden(), torch.zeros(B, T, dtype=torch.bool))
    assert totals.statistics() is None
    found = hidden_statistics(torch.zeros(1, 3, 5))
    assert found.ratio is None and found.kurtosis == 0.0


def test_nan_of_a_real_token_is_shown() -> None:
    """A diverged model must not look healthy."""
    hidden = make_hidden()
    hidden[1, 2, 3] = math.nan
    assert math.isnan(hidden_statistics(hidden).value)
    assert math.isnan(hidden_statistics(hidden[1:2], hidden[:1]).value)


def test_bfloat16_states_are_measured_in_float32() -> None:
    hidden = torch.tensor([[[1.0, -3.0], [2.0, 0.5]]], dtype=torch.bfloat16)
    found = hidden_statistics(hidden)
    assert tuple(found.largest[0]) == (3.0, 0, 1) and found.median == 1.0


def make_scores(N: int, C: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return (2.5 * torch.randn(B, T, N, C, generator=generator, dtype=torch.float64)).sigmoid().to(dtype)


ALL_REAL, FIRST = torch.ones(B, T, dtype=torch.bool), torch.arange(T)[None] == 0


def gate_statistics(*batches: Tensor, activation: str | None = None, is_added: bool = False) -> GateStatistics:
    totals = GateTotals(activation, is_added)
    for scores in batches:
        num_tokens = max(scores.shape[1], 2)
        real = torch.ones(len(scores), num_tokens, dtype=torch.bool)
        totals.add(scores, real, torch.arange(num_tokens)[None] == 0, len(scores))
    found = totals.statistics()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("N", "C"), [(6, 10), (6, 1), (1, 10), (1, 1)], ids=["elementwise", "headwise", "shared", "single"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_scores_are_counted_as_by_a_loop(N: int, C: int, dtype: torch.dtype) -> None:
    scores = make_scores(N, C, dtype)
    real = torch.arange(T) >= torch.tensor([[0], [3], [9]])
    is_first = torch.arange(T) == torch.tensor([[0], [3], [9]])
    totals = GateTotals()
    for rows in (slice(0, 2), slice(2, 3)):
        poisoned = scores.masked_fill(~real[..., None, None], math.nan)
        totals.add(poisoned[rows], real[rows], is_first[rows], len(scores[rows]))
    found = totals.statistics()
    assert found is not None and found.tokens == real.sum() and len(found.by_head) == N
    for statistic, chosen in [(found.whole, scores), *zip(found.by_head, scores.split(1, dim=2), strict=True)]:
        values = chosen[real].double().flatten().tolist()
        assert statistic.n == len(values)
        assert statistic.mean == pytest.approx(statistics.fmean(values), abs=1e-9)
        assert statistic.below_hundredth == pytest.approx(sum(value < 0.01 for value in values) / len(values))
        assert statistic.below_tenth == pytest.approx(sum(value < 0.1 for value in values) / len(values))
        assert statistic.above_nine_tenths == pytest.approx(sum(value > 0.9 for value in values) / len(values))
        first = chosen[is_first].double().flatten().tolist()
        assert statistic.first_token_n == len(first)
        assert statistic.first_token_mean == pytest.approx(statistics.fmean(first))
        assert statistic.rest_mean == pytest.approx(
            statistics.fmean(chosen[real & ~is_first].double().flatten().tolist())
        )
        histogram = [0] * HISTOGRAM_BINS
        for value in values:
            histogram[min(int(value * HISTOGRAM_BINS), HISTOGRAM_BINS - 1)] += 1
        assert statistic.histogram == histogram and sum(histogram) == len(values)
    assert 0 < found.whole.below_tenth < 0.5 > found.whole.above_nine_tenths > 0


def test_values_outside_the_unit_interval_are_in_the_end_bins() -> None:
    """Additive, SiLU, 2 sigmoid and softplus scores leave [0, 1]; means are of the values as they are."""
    found = gate_statistics(torch.tensor([-3.0, -0.2, 0.0, 1.0, 1.7, 5.0]).view(1, 3, 2, 1))
    assert found.whole.histogram == [3, *[0] * 18, 3]
    assert found.whole.mean == pytest.approx(0.75)
    assert [head.mean for head in found.by_head] == pytest.approx([-1.3 / 3, 5.8 / 3])
    assert (found.whole.below_tenth, found.whole.above_nine_tenths) == (0.5, 0.5)


def test_an_input_independent_gate_counts_once() -> None:
    scores = torch.tensor([[0.25, 0.75, 0.5]]).view(1, 1, 3, 1)
    found = gate_statistics(scores, scores)
    assert (found.whole.mean, [head.mean for head in found.by_head]) == (0.5, [0.25, 0.75, 0.5])
    assert (sum(found.whole.histogram), found.whole.n, found.tokens) == (3, 3, 4)
    assert found.whole.first_token_mean is None and found.whole.rest_mean is None and found.sink_correlation == []


def test_more_scores_than_float32_can_count() -> None:
    """A float32 bin stops at 2^24, which a measurement of a model of the paper's size exceeds."""
    scores = torch.full((1, 1, 1, 1), 0.5).expand(1, 17_000, 1, 1000)
    assert gate_statistics(scores).whole.histogram[10] == 17_000_000


def shares(below: int, num_tokens: int, high: float = 0.9) -> Tensor:
    """So many scores of a headwise gate at 0.04 and the rest high; its second head is open."""
    first = torch.where(torch.arange(num_tokens) < below, 0.04, high)
    return torch.stack((first, torch.full_like(first, 0.5)), dim=1)[None, :, :, None]


@pytest.mark.parametrize(
    ("below", "num_tokens", "is_shut", "is_sparse"),
    [
        (10_000, 10_000, True, True),
        (9_990, 10_000, True, True),
        (9_989, 10_000, False, True),
        (9_500, 10_000, False, True),
        (9_499, 10_000, False, False),
        (9_999, 9_999, None, None),
    ],
)
def test_shut_and_sparse_gates(below: int, num_tokens: int, is_shut: bool | None, is_sparse: bool | None) -> None:
    head, open_head = gate_statistics(shares(below, num_tokens), activation="sigmoid").by_head
    assert (head.is_shut, head.is_sparse) == (is_shut, is_sparse)
    assert not open_head.is_shut and not open_head.is_sparse


def test_only_bounded_multiplying_gates_are_judged() -> None:
    scores = shares(10_000, 10_000)
    for activation in ("softplus", "silu", "identity", "tanh"):
        assert gate_statistics(scores, activation=activation).by_head[0].is_shut is None
    assert gate_statistics(scores, activation="sigmoid", is_added=True).by_head[0].is_shut is None
    assert gate_statistics(scores).by_head[0].is_shut is True
    assert gate_statistics(shares(9_999, 10_000, high=1.2)).by_head[0].is_shut is None
    assert gate_statistics(shares(9_999, 10_000, high=1.2), activation="double_sigmoid").by_head[0].is_shut is True


@pytest.mark.parametrize(("N", "C"), [(6, 10), (6, 1), (2, 10), (1, 10)], ids=["sdpa", "headwise", "value", "shared"])
def test_correlation_with_the_sink(N: int, C: int) -> None:
    scores = make_scores(N, C)
    H = 6
    noise = torch.rand(B, H, T, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    by_head = scores.mean(3).repeat_interleave(H // N, 2).transpose(1, 2)
    mass = (0.3 + noise - by_head * torch.linspace(-1, 1, H)[:, None]).clamp(0, 1)
    counted = torch.arange(T) >= torch.tensor([[1], [4], [10]])
    totals = GateTotals()
    totals.add(scores, ALL_REAL, FIRST, B)
    for rows in (slice(0, 1), slice(1, 3)):
        poisoned = mass.masked_fill(~counted[:, None], math.nan)
        totals.add_pairs(scores[rows], poisoned[rows], counted[rows])
    found = totals.statistics()
    assert found is not None and found.queries == counted.sum()
    for h in range(H):
        pairs = by_head[:, h][counted].tolist(), mass[:, h][counted].tolist()
        assert found.sink_correlation[h] == pytest.approx(statistics.correlation(*pairs), abs=1e-9)


def test_what_does_not_vary_has_no_correlation() -> None:
    totals = GateTotals()
    totals.add(torch.full((B, T, 2, 1), 0.3), ALL_REAL, FIRST, B)
    totals.add_pairs(torch.full((B, T, 2, 1), 0.3), torch.rand(B, 2, T), ALL_REAL)
    found = totals.statistics()
    assert found is not None and found.sink_correlation == [None, None]


@pytest.mark.parametrize("size", [1, 2, 17, 5000, 5001])
def test_the_median_is_that_of_sorted_values(size: int) -> None:
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(size)).abs()
    # Even, constant, all but constant, and so that the sample misses the middle.
    periodic = torch.where(torch.arange(size) % 251 == 0, 1000.0, drawn)
    for values in (drawn, torch.zeros(size), torch.where(drawn > 1, drawn, 0.0), periodic):
        assert median_of(values) == sorted(values.tolist())[(size - 1) // 2]

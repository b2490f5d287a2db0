"""Attention mass without a map against the map."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from attention_maps import causal, naive_map, random_tensors

from gatelab.diagnose.attention import key_mass, log_sum_exp, uniform_floor
from gatelab.diagnose.sinks import first_token_share, sink_rate

B, T, H, K, C = 3, 17, 6, 2, 8
SCALE = C**-0.5
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 1e-4}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("position", [0, 3])
@pytest.mark.parametrize("is_causal", [True, False])
def test_mass_on_a_key_is_its_column_of_the_map(dtype: torch.dtype, position: int, is_causal: bool) -> None:
    query, key = random_tensors(B, T, T, H, K, C, dtype)
    visible = causal(T, T) if is_causal else torch.ones(T, T, dtype=torch.bool)
    expected = naive_map(query, key, SCALE, visible)[..., position]
    lse = log_sum_exp(query, key, SCALE, causal=is_causal)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    mass = key_mass(query, key, lse, SCALE, position)
    seen = visible[:, position]
    torch.testing.assert_close(mass[..., seen].double(), expected[..., seen], rtol=0, atol=TOLERANCE[dtype])
    assert expected[..., seen].max() > 0.5 and expected[..., seen].min() < 0.01, "the map is far from flat"


@pytest.mark.parametrize("chunk", [1, 5, 17, 256])
def test_chunks_change_nothing(chunk: int) -> None:
    query, key = random_tensors(B, T, T, H, K, C, torch.float64)
    for is_causal in (True, False):
        expected = log_sum_exp(query, key, SCALE, causal=is_causal)
        torch.testing.assert_close(
            log_sum_exp(query, key, SCALE, causal=is_causal, chunk=chunk), expected, rtol=1e-14, atol=1e-14
        )


@pytest.mark.parametrize("chunk", [2, 256])
def test_queries_are_the_last_of_the_keys(chunk: int) -> None:
    query, key = random_tensors(2, 5, 13, H, K, C, torch.float64)
    expected = naive_map(query, key, SCALE, causal(5, 13))
    mass = key_mass(query, key, log_sum_exp(query, key, SCALE, chunk=chunk), SCALE, 4)
    torch.testing.assert_close(mass, expected[..., 4], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [3, 256])
def test_a_mask_says_which_keys_are_seen(chunk: int) -> None:
    query, key = random_tensors(B, T, T, H, K, C, torch.float64)
    visible = torch.rand(B, T, T, generator=torch.Generator().manual_seed(0)) < 0.4
    visible[..., 2] = True
    visible[1, 6] = False
    expected = naive_map(query, key, SCALE, visible[torch.arange(B)])[..., 2]
    lse = log_sum_exp(query, key, SCALE, visible[:, None], chunk=chunk)
    assert (lse[1, :, 6] == -math.inf).all(), "this query sees nothing"
    seen = visible[:, None, :, 2].expand(B, H, T)
    torch.testing.assert_close(key_mass(query, key, lse, SCALE, 2)[seen], expected[seen], rtol=1e-12, atol=1e-12)


def test_all_columns_of_a_row_add_up_to_one() -> None:
    query, key = random_tensors(B, T, T, H, K, C, torch.float64)
    lse = log_sum_exp(query, key, SCALE, causal=False)
    total = sum(key_mass(query, key, lse, SCALE, position) for position in range(T))
    torch.testing.assert_close(total, torch.ones(B, H, T, dtype=torch.float64))


def test_huge_logits_overflow_nothing() -> None:
    query, key = random_tensors(1, 9, 9, 2, 1, 4, torch.float32)
    lse = log_sum_exp(200 * query, 200 * key, 0.5)
    mass = key_mass(200 * query, 200 * key, lse, 0.5)
    assert lse.isfinite().all() and ((mass >= 0) & (mass <= 1.02)).all()


@pytest.mark.parametrize("skipped", [0, 1, 4])
def test_first_token_share_and_sink_rate(skipped: int) -> None:
    query, key = random_tensors(B, T, T, H, K, C, torch.float64)
    weights = naive_map(query, key, SCALE, causal(T, T))
    share = first_token_share(key_mass(query, key, log_sum_exp(query, key, SCALE), SCALE), skipped)
    expected = torch.zeros(B, H, dtype=torch.float64)
    for b, h in product(range(B), range(H)):
        expected[b, h] = sum(weights[b, h, t, 0].item() for t in range(skipped, T)) / (T - skipped)
    torch.testing.assert_close(share, expected, rtol=1e-12, atol=1e-12)
    threshold = expected.median().item() + 1e-6
    rate = sink_rate(share, threshold)
    assert rate.tolist() == [sum(expected[b, h].item() > threshold for b in range(B)) / B for h in range(H)]
    assert 0 < rate.mean() < 1
    assert sink_rate(share).tolist() == sink_rate(share, 0.3).tolist()


@pytest.mark.parametrize(
    ("num_queries", "counting_all", "without_first"),
    [
        (128, 0.0424, 0.0349),
        (256, 0.0239, 0.0201),
        (512, 0.0133, 0.0114),
        (1024, 0.0073, 0.0064),
        (4096, 0.0022, 0.0019),
    ],
)
def test_the_floor_of_uniform_attention(num_queries: int, counting_all: float, without_first: float) -> None:
    """H_T / T, as tabulated for the paper's figure."""
    assert uniform_floor(num_queries) == pytest.approx(counting_all, abs=5e-5)
    assert uniform_floor(num_queries, skipped=1) == pytest.approx(without_first, abs=5e-5)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("skipped", [0, 1, 3])
def test_the_floor_is_what_equal_keys_give(is_causal: bool, skipped: int) -> None:
    query, key = random_tensors(1, T, T, H, K, C, torch.float64)
    key = key[:, :1].expand(-1, T, -1, -1)
    mass = key_mass(query, key, log_sum_exp(query, key, SCALE, causal=is_causal), SCALE)
    share = first_token_share(mass, skipped)
    torch.testing.assert_close(share, torch.full_like(share, uniform_floor(T, skipped, is_causal)))

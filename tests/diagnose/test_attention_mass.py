"""Attention and its mass on keys without a map against the map."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_maps import CASES, SCALE, B, C, Cv, H, K, T, make_truth, naive_map, naive_visible, random_tensors
from torch import Tensor

from gatelab.diagnose import attention, kernels
from gatelab.diagnose.attention import attend, key_mass, logit_blocks
from gatelab.diagnose.calls import Visibility
from gatelab.diagnose.kernels import find_kernel, passes_self_test
from gatelab.diagnose.sinks import uniform_floor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 1e-4}
OUTPUT_TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 4e-2}


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "find_kernel", lambda *arguments: None)


@pytest.fixture(params=["kernel", "formula"])
def both_ways(request: pytest.FixtureRequest) -> str:
    if request.param == "formula":
        request.getfixturevalue("without_kernel")
    return request.param


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_output_and_mass_are_those_of_the_map(name: str, dtype: torch.dtype, both_ways: str) -> None:
    truth = make_truth(name, dtype)
    call = truth.call
    values = call.value.double().repeat_interleave(H // K, 2)
    output = torch.einsum("bhts,bshc->bthc", truth.weights, values)
    seen = truth.counted
    assert call.output.dtype == dtype and call.output.shape == (B, call.visibility.num_queries, H, Cv)
    torch.testing.assert_close(call.output[seen].double(), output[seen], rtol=0, atol=OUTPUT_TOLERANCE[dtype])
    assert call.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for position in (0, 3, T - 1):
        mass = key_mass(call.query, call.key, call.lse, call.scale, torch.tensor([[position]]), call.softcap)
        sees = (seen & truth.visible[..., position])[:, None].expand_as(mass)
        expected = truth.weights[..., position]
        torch.testing.assert_close(mass[sees].double(), expected[sees], rtol=0, atol=TOLERANCE[dtype])
    assert truth.weights.max() > 0.9


@pytest.mark.parametrize("name", ["a_row_of_padding", "padding_and_sinks"])
def test_who_sees_nothing_gets_nothing(name: str, both_ways: str) -> None:
    truth = make_truth(name, torch.float32)
    blind = ~truth.visible.any(-1)
    assert blind.any() and (truth.call.output[blind] == 0).all()
    lse = truth.call.lse.transpose(1, 2)[blind]
    if truth.call.learned_sinks is None:
        assert (lse == -math.inf).all()
    else:
        torch.testing.assert_close(lse, truth.call.learned_sinks[0, :, 0].expand_as(lse))


def test_each_query_may_ask_for_its_own_key() -> None:
    truth = make_truth("plain", torch.float64)
    position = torch.arange(T).expand(B, -1) // 2
    found = key_mass(truth.call.query, truth.call.key, truth.call.lse, SCALE, position)
    expected = truth.weights.gather(3, position[:, None, :, None].expand(-1, H, -1, -1))[..., 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("entries", [1, 60, 1000, 2**20])
@pytest.mark.parametrize("name", ["plain", "full", "window", "everything", "earlier_keys_window_sinks"])
def test_block_size_changes_nothing(
    name: str, entries: int, monkeypatch: pytest.MonkeyPatch, without_kernel: None
) -> None:
    expected = make_truth(name, torch.float64).call
    monkeypatch.setattr(attention, "BLOCK_ENTRIES", entries)
    found = make_truth(name, torch.float64).call
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(found.output, expected.output, rtol=1e-13, atol=1e-13)
    sizes = [
        block.logits.numel() for block in logit_blocks(found.query, found.key, SCALE, found.visibility, found.softcap)
    ]
    assert max(sizes) <= max(entries, T * H // K)


def test_huge_logits_overflow_nothing(both_ways: str) -> None:
    query, key = random_tensors(1, 9, 9, 2, 1, 4, torch.float32)
    sight = Visibility(9, 9)
    output, lse = attend(200 * query, 200 * key, key, scale=0.5, visibility=sight)
    mass = key_mass(200 * query, 200 * key, lse, 0.5, torch.zeros(1, 1, dtype=torch.int64))
    assert lse.isfinite().all() and output.isfinite().all() and ((mass >= 0) & (mass <= 1.02)).all()


@pytest.mark.parametrize(("C", "Cv"), [(5, 12), (12, 5), (7, 7)])
def test_keys_and_values_of_other_sizes(C: int, Cv: int, both_ways: str) -> None:
    query, key = random_tensors(B, T, T, H, K, C, torch.float32)
    value = random_tensors(B, T, T, H, K, Cv, torch.float32)[1]
    output, _ = attend(query, key, value, scale=SCALE, visibility=Visibility(T, T))
    weights = naive_map(query, key, SCALE, naive_visible(Visibility(T, T), B))
    expected = torch.einsum("bhts,bshc->bthc", weights, value.double().repeat_interleave(H // K, 2))
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_this_machine_has_a_kernel(dtype: torch.dtype) -> None:
    assert find_kernel("cpu", dtype) is not None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
def test_for_other_dtypes_there_is_none(dtype: torch.dtype, device: str) -> None:
    assert find_kernel(device, dtype) is None and find_kernel("meta", torch.float32) is None


def spoiled(kind: str) -> kernels.Kernel:
    """A kernel with one mistake, as another version of torch might bring it."""
    real = kernels._flash_on_cpu

    def kernel(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        output, lse = real(query, key, value, is_causal and kind != "not causal", 1.0 if kind == "scale" else scale)
        if kind == "raises":
            raise RuntimeError("no such operator")
        if kind == "base 2":
            lse = lse / math.log(2)
        if kind == "padded":
            lse = torch.nn.functional.pad(lse, (0, 19))
        if kind == "nan":
            output = output * math.nan
        return output, lse

    return kernel


@pytest.mark.parametrize("kind", ["not causal", "scale", "raises", "base 2", "padded", "nan"])
def test_the_self_test_sees_a_wrong_kernel(kind: str) -> None:
    assert not passes_self_test(spoiled(kind), "cpu", torch.float32)


def test_the_self_test_passes_the_right_one() -> None:
    assert passes_self_test(spoiled("none"), "cpu", torch.float32)


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    find_kernel.cache_clear()
    yield
    find_kernel.cache_clear()


def test_after_a_failed_self_test_the_formula_does_it(monkeypatch: pytest.MonkeyPatch, fresh_choice: None) -> None:
    expected = make_truth("left_padding", torch.float32).call
    find_kernel.cache_clear()
    calls: list[Any] = []
    monkeypatch.setitem(kernels._CANDIDATES, "cpu", (spoiled("base 2"),))
    monkeypatch.setattr(attention, "_attend_in_segments", lambda *arguments: calls.append(arguments))
    found = make_truth("left_padding", torch.float32).call
    assert not calls
    torch.testing.assert_close(found.lse, expected.lse)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [17, 100])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_the_kernels_of_a_gpu(dtype: torch.dtype, num_tokens: int) -> None:
    assert find_kernel("cuda", dtype) is not None
    query, key = (tensor.cuda() for tensor in random_tensors(B, num_tokens, num_tokens, H, K, C, dtype))
    sight = Visibility(num_tokens, num_tokens)
    output, lse = attend(query, key, key, scale=SCALE, visibility=sight)
    expected, expected_lse = attend(query.double(), key.double(), key.double(), scale=SCALE, visibility=sight)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-3)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=5e-2)


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
    sight = Visibility(num_queries, num_queries)
    assert uniform_floor(sight) == pytest.approx(counting_all, abs=5e-5)
    assert uniform_floor(sight, skipped=1) == pytest.approx(without_first, abs=5e-5)
    assert uniform_floor(Visibility(num_queries, num_queries, causal=False)) == 1 / num_queries

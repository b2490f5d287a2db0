"""RMSNorm against its formula."""

from __future__ import annotations

import math

import pytest
import torch

from gatelab.model.norm import RMSNorm

B, T, D = 3, 17, 40


def random_norm(dtype: torch.dtype, centred: bool = False) -> tuple[RMSNorm, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(D, epsilon=0.1, centred=centred).to(dtype)
    norm.weight.data.copy_(torch.randn(D, generator=generator))
    return norm, torch.randn(B, T, D, generator=generator).to(dtype)


@pytest.mark.parametrize("centred", [False, True])
def test_norm_and_gradients_equal_loops(centred: bool) -> None:
    norm, x = random_norm(torch.float64, centred)
    x.requires_grad_()
    rows = []
    for row in x.flatten(0, 1):
        rms = torch.sqrt(sum(value * value for value in row) / D + 0.1)
        factors = 1 + norm.weight if centred else norm.weight
        rows.append(torch.stack([factor * value / rms for factor, value in zip(factors, row, strict=True)]))
    expected = torch.stack(rows).view_as(x)
    actual = norm(x)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(actual, (x, norm.weight), upstream),
        torch.autograd.grad(expected, (x, norm.weight), upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistic_is_wider_than_the_input(dtype: torch.dtype) -> None:
    norm = RMSNorm(D, epsilon=1e-6)
    x = torch.full((1, D), 300.0, dtype=dtype)  # 300^2 is beyond float16
    assert norm(x).dtype == dtype
    assert norm(x).tolist() == [[1.0] * D]


def test_a_centred_norm_multiplies_before_it_casts_back() -> None:
    """1 + w in float32: in bfloat16 1 + 2^-9 would be 1, and the product would be rounded twice."""
    norm, x = random_norm(torch.bfloat16, centred=True)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 0.1)
    assert torch.equal(norm(x), (wide * (1 + norm.weight.float())).bfloat16())
    norm.weight.data.fill_(2**-9)
    assert not torch.equal(norm(x), wide.bfloat16())
    assert (RMSNorm(D, epsilon=0.1, centred=True).weight == 0).all()


def test_scale_of_the_input_does_not_matter() -> None:
    norm = RMSNorm(D, epsilon=1e-12).double()
    x = torch.randn(1, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(norm(1e3 * x), norm(x), rtol=1e-9, atol=0)
    assert math.isclose(norm(x).square().mean().item(), 1.0, rel_tol=1e-9)

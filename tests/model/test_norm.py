"""RMSNorm against its formula."""

from __future__ import annotations

import math

import pytest
import torch

from gatelab.model.norm import RMSNorm

B, T, D = 3, 17, 40


def random_norm(dtype: torch.dtype) -> tuple[RMSNorm, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(D, epsilon=0.1).to(dtype)
    norm.weight.data.copy_(torch.randn(D, generator=generator))
    return norm, torch.randn(B, T, D, generator=generator).to(dtype)


def test_norm_and_gradients_equal_loops() -> None:
    norm, x = random_norm(torch.float64)
    x.requires_grad_()
    rows = []
    for row in x.flatten(0, 1):
        rms = torch.sqrt(sum(value * value for value in row) / D + 0.1)
        rows.append(torch.stack([weight * value / rms for weight, value in zip(norm.weight, row, strict=True)]))
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


def test_scale_of_the_input_does_not_matter() -> None:
    norm = RMSNorm(D, epsilon=1e-12).double()
    x = torch.randn(1, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(norm(1e3 * x), norm(x), rtol=1e-9, atol=0)
    assert math.isclose(norm(x).square().mean().item(), 1.0, rel_tol=1e-9)

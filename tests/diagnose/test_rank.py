"""Ranks from thin factors against the whole matrices."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gatelab.diagnose.rank import effective_rank, output_factors, stable_rank, value_output_singular_values

D, H, K = 37, 6, 2


def weights(Cv: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    value = torch.randn(K * Cv, D, generator=generator, dtype=torch.float64)
    output = torch.randn(D, H * Cv, generator=generator, dtype=torch.float64) * torch.logspace(0, -2, H * Cv).double()
    return value.to(dtype), output.to(dtype)


@pytest.mark.parametrize("Cv", [5, 10, 41])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 1e-4)]
)
def test_singular_values_are_those_of_the_product(Cv: int, dtype: torch.dtype, tolerance: float) -> None:
    value, output = weights(Cv, dtype)
    found = value_output_singular_values(value, output, H, K)
    for head in range(H):
        kv = head // (H // K)
        product = output[:, head * Cv : (head + 1) * Cv].double() @ value[kv * Cv : (kv + 1) * Cv].double()
        expected = torch.linalg.svdvals(product)[: min(Cv, D)]
        torch.testing.assert_close(found[head].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("Cv", [10, 41])
def test_factors_keep_lengths(Cv: int) -> None:
    _, output = weights(Cv)
    x = torch.randn(H, 7, Cv, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for head, factor in enumerate(output_factors(output, H)):
        whole = (x[head] @ output[:, head * Cv : (head + 1) * Cv].T).norm(dim=-1)
        torch.testing.assert_close((x[head] @ factor.T).norm(dim=-1), whole)


def test_known_ranks() -> None:
    values = torch.tensor([[3.0, 3.0, 3.0, 3.0], [2.0, 0.0, 0.0, 0.0], [2.0, 1.0, 0.0, 0.0], [0.0] * 4]).double()
    entropy = math.exp(-(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)))
    assert effective_rank(values).tolist() == pytest.approx([4.0, 1.0, entropy, 0.0])
    assert stable_rank(values).tolist() == pytest.approx([4.0, 1.0, 1.25, 0.0])

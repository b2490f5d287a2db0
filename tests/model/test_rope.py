"""Rotary embedding against complex numbers."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from torch import Tensor

from gatelab.model.rope import inverse_frequencies, rotate, rotation_at
from gatelab.model.settings import RopeSettings

B, T, H, C = 3, 17, 6, 8


def rotate_by_complex_numbers(x: Tensor, positions: Tensor, settings: RopeSettings) -> Tensor:
    """Channels i and i + R/2 of the first R are a complex number, turned by position * base^(-2i/R)."""
    rotated = int(x.shape[-1] * settings.fraction)
    half = rotated // 2
    result = x.clone()
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            for h in range(x.shape[2]):
                for i in range(half):
                    number = complex(x[b, t, h, i], x[b, t, h, i + half])
                    angle = int(positions[b, t]) * settings.base ** (-2 * i / rotated)
                    turned = number * cmath.exp(1j * angle)
                    result[b, t, h, i], result[b, t, h, i + half] = turned.real, turned.imag
    return result


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.25])
def test_rotation_equals_complex_numbers(fraction: float) -> None:
    settings = RopeSettings(base=300.0, fraction=fraction)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, T, H, C, generator=generator, dtype=torch.float64)
    positions = torch.randint(50_000, (B, T), generator=generator)
    actual = rotate(x, rotation_at(positions, settings, C, torch.float64))
    torch.testing.assert_close(actual, rotate_by_complex_numbers(x, positions, settings), rtol=0, atol=1e-9)
    untouched = int(C * fraction)
    assert torch.equal(actual[..., untouched:], x[..., untouched:])


def test_one_row_of_positions_serves_all_rows() -> None:
    settings = RopeSettings()
    x = torch.randn(B, T, H, C, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions = torch.arange(5, 5 + T)[None]
    shared = rotate(x, rotation_at(positions, settings, C, torch.float64))
    assert torch.equal(shared, rotate(x, rotation_at(positions.expand(B, T), settings, C, torch.float64)))


def test_products_depend_on_distance_alone() -> None:
    """The property that makes it a relative embedding, far beyond any training length."""
    settings = RopeSettings()
    query, key = torch.randn(2, 1, 1, 1, C, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def product(query_position: int, key_position: int) -> float:
        turned = [
            rotate(x, rotation_at(torch.tensor([[position]]), settings, C, torch.float64))
            for x, position in ((query, query_position), (key, key_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(1_000_012, 1_000_000) == pytest.approx(product(12, 0), abs=1e-8)
    assert product(12, 0) != pytest.approx(product(0, 12), abs=1e-3)


def test_frequencies_and_the_dtype_they_are_computed_in() -> None:
    settings = RopeSettings(base=10_000.0, fraction=0.5)
    frequencies = inverse_frequencies(settings, 16, torch.float64)
    assert frequencies.tolist() == pytest.approx([10_000.0 ** (-2 * i / 8) for i in range(4)], rel=1e-14)
    rotation = rotation_at(torch.tensor([[1023]]), RopeSettings(), C, torch.bfloat16)
    assert rotation.cos.dtype == torch.bfloat16
    expected = torch.tensor(math.cos(1023.0), dtype=torch.float32).to(torch.bfloat16)  # 1023 itself is no bfloat16
    assert rotation.cos[0, 0, 0, 0] == expected

"""Rotary position embedding (Su et al. 2104.09864), in the half-split form of Llama and Qwen."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gatelab.model.settings import RopeSettings


class Rotation(NamedTuple):
    """Cosines and sines of each token's R/2 angles, repeated for the two halves; one dimension left for the heads."""

    cos: Float[Tensor, "#B T 1 R"]
    sin: Float[Tensor, "#B T 1 R"]


def inverse_frequencies(
    settings: RopeSettings, head_size: int, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "pairs"]:
    """Angle per position of each channel pair, base**(-2i/R) for i = 0 .. R/2 - 1, in radians."""
    rotated = settings.rotated_channels(head_size)
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).to(dtype) / rotated
    return 1.0 / settings.base**exponents


def rotation_at(positions: Int[Tensor, "#B T"], settings: RopeSettings, head_size: int, dtype: torch.dtype) -> Rotation:
    """The rotation for tokens at these positions, computed in float32 (float64 if that is ``dtype``), then cast."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies = inverse_frequencies(settings, head_size, wide).to(positions.device)
    angles = positions[..., None].to(wide) * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, :, None, :]
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(x: Float[Tensor, "B T H C"], rotation: Rotation) -> Float[Tensor, "B T H C"]:
    """Rotate the first R channels of each head; pair i is (i, i + R/2). The other channels pass."""
    rotated_channels = rotation.cos.shape[-1]
    turning, passing = x[..., :rotated_channels], x[..., rotated_channels:]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * rotation.cos + torch.cat((-second, first), dim=-1) * rotation.sin
    return torch.cat((turned, passing), dim=-1) if passing.shape[-1] else turned

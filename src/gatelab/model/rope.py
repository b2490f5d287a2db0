"""Rotary position embedding (Su et al. 2104.09864), in the half-split form of Llama and Qwen, plain or scaled.

Notation: R rotated channels, pairs i = 0 .. R/2 - 1, base b, plain frequency f_i = b**(-2i/R), scaling factor s,
original context L. A pair makes L f_i / 2 pi turns over the original context.

    linear    f_i / s
    ntk       the plain ones of base b s**(R / (R - 2)), so that the slowest pair is that of linear
    yarn      g_i f_i / s + (1 - g_i) f_i, where g_i goes from 0 to 1 linearly in i, between the pairs that make
              beta_fast and beta_slow turns; cosines and sines times 0.1 ln s + 1 (so scores times its square)
    llama3    f_i / s below low_frequency_factor turns, f_i above high_frequency_factor, mixed linearly in the turns

Differs from YaRN's paper as its code does: the ramp is linear in i, not in the turns. Operations have the order of
transformers' ``ROPE_INIT_FUNCTIONS``, so float32 results are bit-equal to theirs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gatelab.model.settings import RopeScaling, RopeSettings


class Rotation(NamedTuple):
    """Cosines and sines of each token's R/2 angles, repeated for the two halves; one dimension left for the heads."""

    cos: Float[Tensor, "#B T 1 R"]
    sin: Float[Tensor, "#B T 1 R"]


def inverse_frequencies(
    settings: RopeSettings, head_size: int, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "pairs"]:
    """Angle per position of each channel pair, in radians; scaled as the settings say."""
    rotated, scaling = settings.rotated_channels(head_size), settings.scaling
    base = plain_base(settings, head_size)
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).to(dtype) / rotated
    turning = base**exponents
    plain = 1.0 / turning
    if scaling is None or scaling.kind == "ntk":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "yarn":
        kept = 1 - _yarn_ramp(scaling, base, rotated, dtype)
        return 1.0 / (scaling.factor * turning) * (1 - kept) + plain * kept
    return _llama3(scaling, plain)


def plain_base(settings: RopeSettings, head_size: int) -> float:
    """The base of the plain frequencies: another one with NTK scaling, which changes nothing else."""
    scaling, rotated = settings.scaling, settings.rotated_channels(head_size)
    if scaling is None or scaling.kind != "ntk":
        return settings.base
    return settings.base * scaling.factor ** (rotated / (rotated - 2))


def attention_factor(scaling: RopeScaling | None) -> float:
    """What cosines and sines are multiplied with: 1 without YaRN."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is None or scaling.mscale_all_dim is None:
        return _mscale(scaling.factor, 1.0)
    return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)


def logit_factor(scaling: RopeScaling | None) -> float:
    """What latent attention multiplies its logits with: (0.1 a ln s + 1)**2 with YaRN's ``mscale_all_dim`` a, else 1.

    Grouped-query attention knows ``mscale_all_dim`` in :func:`attention_factor` alone, as transformers has it.
    """
    if scaling is None or scaling.mscale_all_dim is None:
        return 1.0
    return _mscale(scaling.factor, scaling.mscale_all_dim) ** 2


def rotation_at(positions: Int[Tensor, "#B T"], settings: RopeSettings, head_size: int, dtype: torch.dtype) -> Rotation:
    """The rotation for tokens at these positions, computed in float32 (float64 if that is ``dtype``), then cast."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies = inverse_frequencies(settings, head_size, wide).to(positions.device)
    angles = positions[..., None].to(wide) * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, :, None, :]
    factor = attention_factor(settings.scaling)
    return Rotation((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype))


def rotate(x: Float[Tensor, "B T H C"], rotation: Rotation) -> Float[Tensor, "B T H C"]:
    """Rotate the first R channels of each head; pair i is (i, i + R/2). The other channels pass."""
    rotated_channels = rotation.cos.shape[-1]
    turning, passing = x[..., :rotated_channels], x[..., rotated_channels:]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * rotation.cos + torch.cat((-second, first), dim=-1) * rotation.sin
    return torch.cat((turned, passing), dim=-1) if passing.shape[-1] else turned


def _mscale(factor: int | float, weight: int | float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


def _yarn_ramp(scaling: RopeScaling, base: float, rotated: int, dtype: torch.dtype) -> Float[Tensor, "pairs"]:
    """How far each pair is interpolated: 0 for fast pairs, 1 for slow ones."""
    context = scaling.original_context
    assert context is not None

    def pair_with(turns: float) -> float:
        return rotated * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(rotated // 2, dtype=dtype) - low) / (high - low)).clamp(0, 1)


def _llama3(scaling: RopeScaling, plain: Float[Tensor, "pairs"]) -> Float[Tensor, "pairs"]:
    context, low, high = scaling.original_context, scaling.low_frequency_factor, scaling.high_frequency_factor
    assert context is not None and low is not None and high is not None
    wavelengths = 2 * math.pi / plain
    share_kept = (context / wavelengths - low) / (high - low)
    mixed = (1 - share_kept) * plain / scaling.factor + share_kept * plain
    scaled = torch.where(wavelengths > context / low, plain / scaling.factor, mixed)
    return torch.where(wavelengths < context / high, plain, scaled)

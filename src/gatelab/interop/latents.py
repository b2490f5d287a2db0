"""Latent attention as DeepSeek-V3 stores it: channels that turn together are neighbours there, halves here.

A pair of rotated channels is (2i, 2i + 1) in DeepSeek's files and (i, i + R/2) in :mod:`gatelab.model.rope`. Queries
and the shared key change their order together, so no score changes. Our order is that of ``rope_interleave=false``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from gatelab.interop.tensor_names import Made, itself
from gatelab.model.settings import ModelSettings

NORM_EPSILON = 1e-6  # of the latents' norms in DeepSeek's code, whatever rms_norm_eps says
_OF_QUERIES = ("self_attn.q_proj.weight", "self_attn.q_b_proj.weight")
_OF_SHARED_KEY = "self_attn.kv_a_proj_with_mqa.weight"


def ways_from_pairs(ways: Callable[[str], Sequence[Made]], settings: ModelSettings, name: str) -> list[Made]:
    """The same ways to make one of our tensors, from files whose rotated channels are stored in pairs."""
    size = _stretch(settings, name)
    if size is None:
        return list(ways(name))
    return [Made(way.sources, partial(_after, way.build, size, settings.rotary_size)) for way in ways(name)]


def in_pairs(settings: ModelSettings, name: str) -> Made:
    """One of our tensors as DeepSeek stores it."""
    size = _stretch(settings, name)
    return Made((name,), itself if size is None else partial(pairs_from_halves, size, settings.rotary_size))


def halves_from_pairs(size: int, rotated: int, weight: Float[Tensor, "rows D"]) -> Float[Tensor, "rows D"]:
    """Rows in stretches of ``size``, of which the last ``rotated`` are pairs, in our order."""
    still, turning = weight.unflatten(0, (-1, size)).split([size - rotated, rotated], dim=1)
    return torch.cat((still, turning[:, 0::2], turning[:, 1::2]), dim=1).flatten(0, 1)


def pairs_from_halves(size: int, rotated: int, weight: Float[Tensor, "rows D"]) -> Float[Tensor, "rows D"]:
    """The inverse of :func:`halves_from_pairs`."""
    half = rotated // 2
    still, first, second = weight.unflatten(0, (-1, size)).split([size - rotated, half, half], dim=1)
    return torch.cat((still, torch.stack((first, second), dim=2).flatten(1, 2)), dim=1).flatten(0, 1)


def _stretch(settings: ModelSettings, name: str) -> int | None:
    """Rows of a tensor at whose ends rotated channels are; ``None`` for one without any."""
    assert settings.latent is not None
    if name.endswith(_OF_QUERIES):
        return settings.head_size
    return settings.latent.key_value_rank + settings.rotary_size if name.endswith(_OF_SHARED_KEY) else None


def _after(build: Callable[..., Tensor], size: int, rotated: int, *sources: Tensor) -> Tensor:
    return halves_from_pairs(size, rotated, build(*sources))

"""Rounding to few levels and back: pure functions on tensors.

With the ends a <= 0 <= b of a range and n bits, the integer levels are (q - z) s with

    asymmetric:  s = (b - a) / (2^n - 1),            z = round(-a / s),  q = clamp(round(x / s) + z, 0, 2^n - 1)
    symmetric:   s = max(-a, b) / (2^(n-1) - 1),     z = 0,              |q| <= 2^(n-1) - 1

(Jacob et al. 1712.05877), and those of e4m3 are s e4m3(x / s) with s = max(-a, b) / 448. Halves go to the even level.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gatelab.evaluate.quantisation.schemes import ActivationRounding, Levels, WeightRounding
from gatelab.interop.int8 import nearest_int8

LARGEST_E4M3 = 448.0
_SHARED_DIMS = {"tensor": (0, 1), "channel": (1,), "group": (2,)}


class Range(NamedTuple):
    """The ends of what is told apart, in float32 at least, broadcastable to the values that share them."""

    low: Float[Tensor, "*range"]
    high: Float[Tensor, "*range"]

    def beyond(self, x: Float[Tensor, "*values"]) -> Bool[Tensor, "*values"]:
        """Which values are clipped."""
        return (x < self.low) | (x > self.high)


class IntegerGrid(NamedTuple):
    """Evenly spaced levels: integer q from ``least`` to ``most`` stands for (q - ``zero``) ``step``."""

    step: Float[Tensor, "*range"]
    zero: Float[Tensor, "*range"]
    least: int
    most: int

    def integers(self, x: Float[Tensor, "*values"]) -> Float[Tensor, "*values"]:
        """The nearest integers."""
        return ((x / self.step).round() + self.zero).clamp(self.least, self.most)

    def values(self, integers: Float[Tensor, "*values"]) -> Float[Tensor, "*values"]:
        """What integers stand for."""
        return (integers - self.zero) * self.step


def range_of(low: Tensor, high: Tensor, levels: Levels) -> Range:
    """The range of these levels that holds values from ``low`` to ``high``: it holds 0, and -x with x if symmetric."""
    if levels.symmetric:
        end = torch.maximum(-low, high).clamp(min=0)
        return Range(-end, end)
    return Range(low.clamp(max=0), high.clamp(min=0))


def integer_grid(ends: Range, levels: Levels) -> IntegerGrid:
    """The levels of a range; a range that is 0 alone has a step of 1."""
    most = 2 ** (levels.bits - 1) - 1 if levels.symmetric else 2**levels.bits - 1
    step = (ends.high if levels.symmetric else ends.high - ends.low) / most
    step = torch.where(step == 0, 1, step)
    if levels.symmetric:
        return IntegerGrid(step, torch.zeros_like(step), -most, most)
    return IntegerGrid(step, (-ends.low / step).round(), 0, most)


def rounded(x: Float[Tensor, "*values"], ends: Range, levels: Levels) -> Float[Tensor, "*values"]:
    """Each value at the nearest level of its range."""
    if levels.kind == "integer":
        grid = integer_grid(ends, levels)
        return grid.values(grid.integers(x))
    scale = torch.where(ends.high == 0, 1, ends.high / LARGEST_E4M3)
    narrow = (x / scale).clamp(-LARGEST_E4M3, LARGEST_E4M3).float().to(torch.float8_e4m3fn)
    return narrow.to(x.dtype) * scale


def rounded_weight(weight: Float[Tensor, "O I"], rounding: WeightRounding) -> Float[Tensor, "O I"]:
    """What is left of a weight, in its own dtype."""
    if rounding.levels.kind == "torchao_int8":
        return nearest_int8(weight)
    wide = widened(weight)
    shared = wide if rounding.group_size is None else wide.unflatten(1, (-1, rounding.group_size))
    dims = _SHARED_DIMS[rounding.per]
    ends = range_of(shared.amin(dims, keepdim=True), shared.amax(dims, keepdim=True), rounding.levels)
    return rounded(shared, ends, rounding.levels).view_as(weight).to(weight.dtype)


def range_of_activations(x: Float[Tensor, "*B I"], rounding: ActivationRounding) -> Range:
    """The range of what is read at once, or of each token of it."""
    dims = (-1,) if rounding.per == "token" else tuple(range(x.dim()))
    return range_of(x.amin(dims, keepdim=True), x.amax(dims, keepdim=True), rounding.levels)


def widened(x: Float[Tensor, "*values"]) -> Float[Tensor, "*values"]:
    """The same in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

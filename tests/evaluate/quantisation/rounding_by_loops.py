"""Every scheme once more, value by value in Python's floats."""

from __future__ import annotations

import math

import torch

from gatelab.evaluate.quantisation.schemes import ActivationRounding, Levels, WeightRounding

Ends = tuple[float, float]


def to_even(x: float) -> int:
    """The nearest integer, halves to the even one."""
    below = math.floor(x)
    if x - below != 0.5:
        return below if x - below < 0.5 else below + 1
    return below if below % 2 == 0 else below + 1


def nearest_level(x: float, ends: Ends, levels: Levels) -> float:
    """One value, rounded and back."""
    low, high = ends
    if levels.kind == "torchao_int8":
        step = max(-low, high) / 127.5
        return 0.0 if step == 0 else min(max(to_even(x / step), -128), 127) * step
    if levels.kind == "e4m3":
        scale = max(-low, high) / 448
        return 0.0 if scale == 0 else e4m3(min(max(x / scale, -448.0), 448.0)) * scale
    if levels.symmetric:
        most = 2 ** (levels.bits - 1) - 1
        step = max(-low, high, 0.0) / most
        return 0.0 if step == 0 else min(max(to_even(x / step), -most), most) * step
    low, high, most = min(low, 0.0), max(high, 0.0), 2**levels.bits - 1
    step = (high - low) / most
    if step == 0:
        return 0.0
    zero = to_even(-low / step)
    return (min(max(to_even(x / step) + zero, 0), most) - zero) * step


def e4m3(x: float) -> float:
    """The nearest of +-2^e (1 + m / 8) with -6 <= e <= 8, and of m / 8 2^-6; a tie goes to the even m."""
    positive = [m / 8 * 2.0**-6 for m in range(8)]
    positive += [2.0**e * (1 + m / 8) for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)]
    best = min(range(len(positive)), key=lambda number: (abs(abs(x) - positive[number]), number % 2))
    assert positive[best] == abs(float(torch.tensor(x, dtype=torch.float32).to(torch.float8_e4m3fn)))
    return math.copysign(positive[best], x)


def ends_of(values: list[float]) -> Ends:
    """The least and the largest."""
    return min(values), max(values)


def weight_by_loops(weight: list[list[float]], rounding: WeightRounding) -> list[list[float]]:
    """A weight, row by row."""
    whole = ends_of([value for row in weight for value in row])
    found = []
    for row in weight:
        size = rounding.group_size or len(row)
        found.append([])
        for start in range(0, len(row), size):
            part = row[start : start + size]
            ends = whole if rounding.per == "tensor" else ends_of(part)
            found[-1] += [nearest_level(value, ends, rounding.levels) for value in part]
    return found


def static_ends(values: list[float], rounding: ActivationRounding) -> Ends:
    """The ends of a range that leaves a share of ``tail`` beyond each, of |x| if symmetric."""
    if rounding.levels.symmetric:
        values = [abs(value) for value in values]
    ascending = sorted(values)
    cut = int(rounding.tail * len(values))
    high = ascending[len(values) - 1 - cut]
    return (-high, high) if rounding.levels.symmetric else (ascending[cut], high)


def activations_by_loops(tokens: list[list[float]], rounding: ActivationRounding, static: Ends) -> list[list[float]]:
    """Inputs, token by token."""
    whole = static if rounding.static else ends_of([value for token in tokens for value in token])
    return [
        [nearest_level(value, ends_of(token) if rounding.per == "token" else whole, rounding.levels) for value in token]
        for token in tokens
    ]

"""Every named way to quantise, one line each. Nothing here imports torch.

The names are a contract: commands, studies and reports refer to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from gatelab.settings import Settings, nearest

FEWEST_BITS, MOST_BITS = 2, 8
Axes = Mapping[str, object]


class Levels(Settings):
    """The numbers that values are rounded to, the nearest one each.

    ``integer`` has 2^bits evenly spaced levels from the least to the largest value of a range and 0 among them, or when
    ``symmetric`` 2^bits - 1 around 0. ``e4m3`` is float8 (torch.float8_e4m3fn, largest 448) times one scale for each
    range. ``torchao_int8`` is :func:`gatelab.interop.int8.nearest_int8`.
    """

    kind: Literal["integer", "e4m3", "torchao_int8"] = "integer"
    bits: int = 8
    symmetric: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not FEWEST_BITS <= self.bits <= MOST_BITS:
            raise ValueError(f"bits={self.bits} can't be simulated; take {FEWEST_BITS} to {MOST_BITS}")
        if self.kind != "integer" and (self.bits, self.symmetric) != (8, True):
            raise ValueError(f"{self.kind} has 8 bits and is symmetric; leave bits and symmetric out, or take integer")
        return self

    @property
    def description(self) -> str:
        """In words, for a table."""
        if self.kind != "integer":
            return self.kind
        return f"int{self.bits}{'' if self.symmetric else ' asymmetric'}"


class WeightRounding(Settings):
    """A weight's levels, and which of its values share a range: all, an output channel's, or so many inputs of one."""

    levels: Levels = Levels()
    per: Literal["tensor", "channel", "group"] = "channel"
    group_size: int | None = Field(default=None, ge=2)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.per == "group") != (self.group_size is not None):
            raise ValueError(f"per={self.per} with group_size={self.group_size} is impossible; give it with per=group")
        if self.levels.kind == "torchao_int8" and self.per != "channel":
            raise ValueError(f"torchao_int8 has a step for each channel, not per={self.per}; take per=channel")
        return self

    @property
    def description(self) -> str:
        """In words, for a table."""
        shared = self.per if self.group_size is None else f"group of {self.group_size}"
        return f"{self.levels.description} per {shared}"


class ActivationRounding(Settings):
    """The levels of what a linear layer reads, and which values share a range.

    A ``static`` range is measured once, on text to calibrate on, and holds for every token; else each token, or each
    text that is read at once, has the range of its own values. ``tail`` is the share of the calibration's values that
    lie beyond each end of a static range: 0 takes the least and the largest, 1e-4 the 99.99th percentiles.
    """

    levels: Levels = Levels()
    per: Literal["tensor", "token"] = "tensor"
    static: bool = False
    tail: float = Field(default=0.0, ge=0, le=0.01)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.static and self.per == "token":
            raise ValueError("a static range holds for every token, so per=token is impossible; take per=tensor")
        if self.tail and not self.static:
            raise ValueError(f"tail={self.tail:g} cuts values of a calibration, and there is none; take static=true")
        if self.levels.kind == "torchao_int8":
            raise ValueError("torchao_int8 is for weights; take integer for activations")
        return self

    @property
    def description(self) -> str:
        """In words, for a table."""
        how = "dynamic" if not self.static else f"static, tails of {self.tail:g}" if self.tail else "static"
        return f"{self.levels.description} per {self.per}, {how}"


class Scheme(Settings):
    """A way to quantise linear layers: their weights, what they read, or both; biases and sums stay as they are."""

    weights: WeightRounding | None = None
    activations: ActivationRounding | None = None
    origin: str

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.weights is None and self.activations is None:
            raise ValueError("the scheme rounds neither weights nor activations, so it changes nothing; give one")
        return self

    @property
    def needs_calibration(self) -> bool:
        """Whether ranges must be measured on a text before."""
        return self.activations is not None and self.activations.static


def find_scheme(name: str) -> Scheme:
    """The scheme with this name; a ``ValueError`` with the nearest name and the list for any other."""
    if name not in SCHEMES:
        raise ValueError(f"scheme {name!r} is unknown; {nearest(name, SCHEMES)}")
    return SCHEMES[name]


def parse_schemes(words: str) -> tuple[str, ...]:
    """Names with commas between them; ``ValueError`` for an unknown or repeated name, and for none."""
    names = tuple(word.strip() for word in words.split(",") if word.strip())
    if not names:
        raise ValueError(f"schemes {words!r} names none; {nearest('w8a8', SCHEMES)}")
    for name in names:
        find_scheme(name)
        if names.count(name) > 1:
            raise ValueError(f"scheme {name} is given twice; give each scheme once")
    return names


def _scheme(origin: str, /, weights: Axes, activations: Axes | None = None) -> Scheme:
    return Scheme.parse({"origin": origin, "weights": weights, "activations": activations})


_INT4, _ASYMMETRIC_INT4 = {"bits": 4}, {"bits": 4, "symmetric": False}
_ASYMMETRIC, _E4M3 = {"symmetric": False}, {"kind": "e4m3"}


def _by(per: str, /, levels: Axes | None = None, **others: object) -> Axes:
    return {"per": per, "levels": levels or {}, **others}


# fmt: off
SCHEMES: dict[str, Scheme] = {
    "w8a8": _scheme("Bondarenko et al. 2306.12929", _by("tensor"), _by("tensor", _ASYMMETRIC, static=True)),
    "w8a8_percentile": _scheme(
        "the same at the 99.99th percentiles", _by("tensor"), _by("tensor", _ASYMMETRIC, static=True, tail=1e-4)),
    "w8a8_per_channel": _scheme(
        "the same with weights per channel", _by("channel"), _by("tensor", _ASYMMETRIC, static=True)),
    "w8a8_dynamic": _scheme("dynamic per tensor", _by("tensor"), _by("tensor", _ASYMMETRIC)),
    "w8a8_per_token": _scheme("LLM.int8() 2208.07339 without its outliers", _by("channel"), _by("token")),
    "w4a4": _scheme("dynamic per token, weights per channel", _by("channel", _INT4), _by("token", _INT4)),
    "w4a4_static": _scheme(
        "static per tensor", _by("tensor", _INT4), _by("tensor", _ASYMMETRIC_INT4, static=True)),
    "w4_group32": _scheme("weights alone, by groups of 32 inputs", _by("group", _INT4, group_size=32)),
    "int8_weights": _scheme("weights alone, torchao's int8", _by("channel", {"kind": "torchao_int8"})),
    "fp8": _scheme("e4m3, static per tensor", _by("tensor", _E4M3), _by("tensor", _E4M3, static=True)),
    "fp8_per_token": _scheme("e4m3, dynamic per token", _by("channel", _E4M3), _by("token", _E4M3)),
}
# fmt: on

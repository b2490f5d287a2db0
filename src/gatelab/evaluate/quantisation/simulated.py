"""A decoder computed as if quantised: weights replaced, inputs of linear layers rounded on their way in.

The products and sums are the model's own floating point, of levels that integers or float8 stand for: what a kernel
with exact accumulation gives. Everything between the linear layers stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gatelab.evaluate.quantisation.layers import Place, linear_layers, require_roundable
from gatelab.evaluate.quantisation.rounding import (
    Range,
    range_of,
    range_of_activations,
    rounded,
    rounded_weight,
    widened,
)
from gatelab.evaluate.quantisation.schemes import ActivationRounding, Scheme, WeightRounding


class Share:
    """How many of the values that were seen are of one kind."""

    def __init__(self) -> None:
        self.count = self.total = 0

    def add(self, chosen: Bool[Tensor, "*values"]) -> None:
        """Count the values of one pass."""
        self.count += int(chosen.sum())
        self.total += chosen.numel()

    @property
    def value(self) -> float:
        """0 where nothing was seen."""
        return self.count / self.total if self.total else 0.0


@contextmanager
def quantised(
    model: nn.Module, scheme: Scheme, calibration: Int[Tensor, "M T"] | None = None, gates: bool = True
) -> Iterator[dict[Place, Share]]:
    """While it lasts, the model's linear layers compute as the scheme has it; then it is the same bit for bit.

    Static ranges are those of the unquantised model on the ``calibration`` windows. Gives the share of clipped inputs
    of each layer, which fills as the model reads; it is empty where ranges are dynamic, which clip nothing. Raises
    ``ValueError``, before any pass, as :func:`linear_layers` and :func:`require_roundable` do and for a calibration
    that is missing or too short (:func:`require_calibration`).
    """
    layers = linear_layers(model, gates)
    require_roundable(layers, scheme)
    ranges: Mapping[Place, Range] = {}
    if scheme.activations is not None and scheme.needs_calibration:
        ranges = calibrate(model, layers, scheme.activations, calibration)
    clipped = {place: Share() for place in ranges}
    with ExitStack() as stack:
        if scheme.weights is not None:
            stack.enter_context(_replaced_weights(layers, scheme.weights))
        if scheme.activations is not None:
            for place, linear in layers.items():
                hook = partial(_round_input, scheme.activations, ranges.get(place), clipped.get(place))
                stack.callback(linear.register_forward_pre_hook(hook).remove)
        yield clipped


@torch.no_grad()
def calibrate(
    model: nn.Module,
    layers: Mapping[Place, nn.Linear],
    rounding: ActivationRounding,
    tokens: Int[Tensor, "M T"] | None,
) -> dict[Place, Range]:
    """The static range of each layer's input: beyond each end lies a share of ``tail`` of the values, rounded down.

    A symmetric range is of |x|. Raises ``ValueError`` as :func:`require_calibration` does, and for a layer that no
    token reaches.
    """
    tokens = require_calibration(layers, rounding, tokens)
    symmetric = rounding.levels.symmetric
    ends = {place: (_End(tokens.numel(), rounding.tail), _End(tokens.numel(), rounding.tail)) for place in layers}

    def note(place: Place, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = widened(inputs[0])
        ends[place][0].add(x.abs() if symmetric else x)
        ends[place][1].add(x.abs() if symmetric else -x)

    with ExitStack() as stack:
        for place, linear in layers.items():
            stack.callback(linear.register_forward_pre_hook(partial(note, place)).remove)
        for window in tokens:
            model(window[None])
    if unreached := [place for place, (high, _) in ends.items() if not high.count]:
        raise ValueError(f"no token to calibrate on reaches {unreached[0]}; calibrate on more text")
    return {place: range_of(-low.value, high.value, rounding.levels) for place, (high, low) in ends.items()}


def require_calibration(
    layers: Mapping[Place, nn.Linear], rounding: ActivationRounding, tokens: Int[Tensor, "M T"] | None
) -> Int[Tensor, "M T"]:
    """The windows to calibrate on; ``ValueError`` when there are none, or too few tokens to have a tail."""
    if tokens is None or not tokens.numel():
        raise ValueError("static ranges are measured on a text, and there is none; give windows to calibrate on")
    narrowest = min(linear.in_features for linear in layers.values())
    if rounding.tail and tokens.numel() * narrowest * rounding.tail < 1:
        raise ValueError(
            f"{tokens.numel()} tokens with {narrowest} inputs have no value in a tail of {rounding.tail:g}; "
            f"calibrate on at least {int(1 / (narrowest * rounding.tail)) + 1} tokens"
        )
    return tokens


class _End:
    """The largest value but a share of ``tail``, over passes of at most so many tokens."""

    def __init__(self, num_tokens: int, tail: float):
        self._num_tokens, self._tail = num_tokens, tail
        self._largest: Tensor | None = None
        self.count = 0

    def add(self, values: Float[Tensor, "*B I"]) -> None:
        kept = int(self._tail * self._num_tokens * values.shape[-1]) + 1
        self.count += values.numel()
        flat = values.flatten()
        if self._largest is not None:
            flat = torch.cat((self._largest, flat))
        self._largest = flat.topk(min(kept, len(flat))).values

    @property
    def value(self) -> Float[Tensor, ""]:
        assert self._largest is not None
        return self._largest[int(self._tail * self.count)]


@contextmanager
def _replaced_weights(layers: Mapping[Place, nn.Linear], rounding: WeightRounding) -> Iterator[None]:
    """Rounded values in the parameters, and the very tensors from before back in them afterwards."""
    originals = {linear.weight: linear.weight.data for linear in layers.values()}
    try:
        for parameter, original in originals.items():
            parameter.data = rounded_weight(original, rounding)
        yield
    finally:
        for parameter, original in originals.items():
            parameter.data = original


def _round_input(
    rounding: ActivationRounding, static: Range | None, clipped: Share | None, module: nn.Module, inputs: Any
) -> Any:
    x, *others = inputs
    if not x.numel():
        return inputs
    values = widened(x)
    ends = range_of_activations(values, rounding) if static is None else static
    if clipped is not None:
        clipped.add(ends.beyond(values))
    return (rounded(values, ends, rounding.levels).to(x.dtype), *others)

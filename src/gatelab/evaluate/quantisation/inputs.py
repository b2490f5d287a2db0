"""What linear layers read: the outliers that make a model hard to quantise."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from gatelab.diagnose.activations import HiddenStatistics, HiddenTotals
from gatelab.evaluate.quantisation.layers import Place


class LinearInput(NamedTuple):
    """What one or several linear layers of a decoder layer read, and the sizes of its values over all tokens."""

    layer: int
    readers: tuple[str, ...]
    statistics: HiddenStatistics


@torch.no_grad()
def measure_inputs(
    model: nn.Module, layers: Mapping[Place, nn.Linear], tokens: Int[Tensor, "N T"]
) -> list[LinearInput]:
    """The inputs of these layers, window by window; a tensor that several read is there once, in the first's place.

    A layer that no token reaches is left out.
    """
    totals: dict[Place, HiddenTotals] = {}
    readers: dict[Place, dict[Place, None]] = {}
    last: list[tuple[Place, Tensor]] = []

    def note(place: Place, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        (x,) = inputs[:1]
        is_shared = bool(last) and last[-1][1] is x and last[-1][0].layer == place.layer
        owner = last[-1][0] if is_shared else place
        readers.setdefault(owner, {})[place] = None
        if not is_shared:
            last[:] = [(place, x)]
            totals.setdefault(place, HiddenTotals()).add(x.reshape(1, -1, x.shape[-1]))

    with ExitStack() as stack:
        for place, linear in layers.items():
            stack.callback(linear.register_forward_pre_hook(partial(note, place)).remove)
        for window in tokens:
            last.clear()
            model(window[None])
    found = []
    for place in layers:
        statistics = totals[place].statistics() if place in totals else None
        if statistics is not None:
            found.append(LinearInput(place.layer, tuple(one.name for one in readers[place]), statistics))
    return found

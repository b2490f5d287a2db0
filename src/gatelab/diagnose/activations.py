"""Massive activations: the few channels of a few tokens whose hidden values dwarf the rest (Sun et al. 2402.17762)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gatelab.diagnose.attention import widened

LARGE = 100.0
MASSIVE_MEDIANS = 1000.0
NUM_LARGEST = 3
_SAMPLED = 251  # one value of so many, coprime to the usual widths


class Activation(NamedTuple):
    """One |h| and where it is; the token is counted from the start of its row."""

    value: float
    token: int
    channel: int


class HiddenStatistics(NamedTuple):
    """Sizes of a layer's output h over all real tokens, before any final norm.

    - ``largest``: the three largest |h|; the paper's M-Act is the mean over layers of the first (arXiv 2505.06708,
      table 4: over how many tokens is not said there, here ``tokens``).
    - ``median``: the median |h| of a sample, averaged over samples; ``ratio`` = largest / median.
    - ``share_above_100``: share of the channels with some |h| > 100; ``share_above_1000_medians``: with some
      |h| > 1000 ``median``. Both at once make a value massive (Sun et al.).
    - ``kurtosis``: mean over tokens of E[(h - E h)^4] / Var(h)^2 over the channels: 3 for a normal distribution.
      Tokens without variance are left out.
    - ``residual_norm``: mean over tokens of the length of h.
    """

    largest: list[Activation]
    median: float
    share_above_100: float
    share_above_1000_medians: float
    kurtosis: float
    residual_norm: float
    tokens: int

    @property
    def value(self) -> float:
        """The largest |h|."""
        return self.largest[0].value

    @property
    def ratio(self) -> float | None:
        """The largest |h| in medians; ``None`` when half of the state is zero."""
        return self.value / self.median if self.median else None


class HiddenTotals:
    """Running sums and maxima of one layer's output."""

    def __init__(self) -> None:
        self.values, self.places = torch.zeros(0, dtype=torch.float64), torch.zeros(0, 2, dtype=torch.int64)
        self.channel_maxima: Float[Tensor, "D"] | None = None
        self.sum_medians, self.samples = 0.0, 0
        self.sum_kurtosis, self.spread_tokens = 0.0, 0
        self.sum_norms, self.tokens = 0.0, 0

    def add(self, hidden: Float[Tensor, "B T D"], real: Bool[Tensor, "B T"] | None = None) -> None:
        """Add one pass, sample by sample; padding (not ``real``) is left out."""
        for sample, states in enumerate(hidden):
            places = torch.arange(len(states), device=states.device)
            if real is not None:
                places = places[real[sample]]
                states = states[places]
            if len(places):
                self._add_sample(widened(states), places)

    def _add_sample(self, states: Float[Tensor, "T D"], places: Tensor) -> None:
        magnitude = states.abs()
        maxima = magnitude.amax(0)
        # The three largest values lie in the three channels with the largest maxima.
        channels = maxima.topk(min(NUM_LARGEST, len(maxima))).indices
        few = magnitude[:, channels]
        values, flat = few.flatten().topk(min(NUM_LARGEST, few.numel()))
        found = torch.stack((places[flat // len(channels)], channels[flat % len(channels)]), dim=1).cpu()
        values = torch.cat((self.values, values.double().cpu()))
        # Stable, so that of equal values the first one stays.
        order = values.sort(descending=True, stable=True).indices[:NUM_LARGEST]
        self.values, self.places = values[order], torch.cat((self.places, found))[order]
        maxima = maxima.cpu()
        self.channel_maxima = maxima if self.channel_maxima is None else self.channel_maxima.maximum(maxima)
        self.sum_medians += median_of(magnitude.flatten())
        self.samples += 1
        self.sum_norms += float(states.norm(dim=-1).sum(dtype=torch.float64))
        self.tokens += len(states)
        squares = (states - states.mean(-1, keepdim=True)).square_()
        variance = squares.mean(-1)
        spread = variance != 0
        kurtosis = squares.square_().mean(-1)[spread] / variance[spread].square()
        self.sum_kurtosis += float(kurtosis.sum(dtype=torch.float64))
        self.spread_tokens += int(spread.sum())

    def statistics(self) -> HiddenStatistics | None:
        """The figures over all passes; ``None`` when no real token came."""
        if self.channel_maxima is None:
            return None
        median = self.sum_medians / self.samples
        places = self.places.tolist()
        return HiddenStatistics(
            largest=[Activation(value, *place) for value, place in zip(self.values.tolist(), places, strict=True)],
            median=median,
            share_above_100=float((self.channel_maxima > LARGE).double().mean()),
            share_above_1000_medians=float((self.channel_maxima > MASSIVE_MEDIANS * median).double().mean()),
            kurtosis=self.sum_kurtosis / max(self.spread_tokens, 1),
            residual_norm=self.sum_norms / self.tokens,
            tokens=self.tokens,
        )


def median_of(values: Float[Tensor, "n"]) -> float:
    """The lower median, as ``torch.median`` gives it, several times faster for many values.

    A sample brackets it; what lies below the bracket is counted, what lies inside is searched.
    """
    rank = (len(values) - 1) // 2
    sample = values[::_SAMPLED].sort().values
    low, high = sample[len(sample) * 12 // 25], sample[len(sample) * 13 // 25]
    inside = values[(values >= low) & (values <= high)]
    rank -= int((values < low).sum())
    if 0 <= rank < len(inside):
        return float(inside.kthvalue(rank + 1).values)
    return float(values.median())

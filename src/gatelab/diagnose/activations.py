"""Massive activations: the few channels of a few tokens whose hidden values dwarf the rest (Sun et al. 2402.17762)."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class LargestActivation(NamedTuple):
    """The largest |h| of a layer's output, where it is, and the median |h| that it stands out from."""

    value: float
    token: int
    channel: int
    median: float


def largest_activation(hidden: Float[Tensor, "B T D"]) -> LargestActivation:
    """Over all samples, tokens and channels; the token is counted from the start of its sample.

    The paper's M-Act is the mean of ``value`` over layers.
    """
    magnitude = hidden.abs().float()
    flat_index = int(magnitude.argmax())
    num_tokens, num_channels = hidden.shape[1:]
    return LargestActivation(
        value=float(magnitude.max()),
        token=flat_index // num_channels % num_tokens,
        channel=flat_index % num_channels,
        median=float(magnitude.median()),
    )

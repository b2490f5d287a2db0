"""Attention sinks: how much of its attention a head parks on the first token."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

SINK_THRESHOLD = 0.3


def first_token_share(mass: Float[Tensor, "B H T"], skipped: int = 0) -> Float[Tensor, "B H"]:
    """Mean over queries of the attention to the first token; the first ``skipped`` queries are left out.

    The paper's F-Attn is its mean over heads, then layers (arXiv 2505.06708, table 4). Query 0 sees itself alone and
    adds 1/T.
    """
    return mass[..., skipped:].mean(-1)


def sink_rate(share: Float[Tensor, "B H"], threshold: float = SINK_THRESHOLD) -> Float[Tensor, "H"]:
    """Share of the samples in which a head's first-token share exceeds the threshold (Gu et al. 2410.10781)."""
    return (share > threshold).to(share.dtype).mean(0)

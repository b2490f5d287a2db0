"""Root mean square normalisation (Zhang and Sennrich 1910.07467)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; the statistic is computed in float32 at least.

    A centred norm multiplies by 1 + weight instead, in float32 at least before it casts back; its weight starts at 0.
    """

    def __init__(self, size: int, epsilon: float, centred: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if centred else torch.ones(size))
        self.epsilon, self.centred = epsilon, centred

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """The normalised tensor in the dtype of ``x``."""
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        if self.centred:
            return (normed * (1 + self.weight.to(wide.dtype))).to(x.dtype)
        return self.weight.to(x.dtype) * normed.to(x.dtype)

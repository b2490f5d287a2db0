"""SwiGLU feed-forward layer (Shazeer 2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gatelab.gates.linear import Linear


class FeedForward(nn.Module):
    """down(silu(gate x) * up x), D -> F -> D, without biases; names as in Hugging Face's Qwen3."""

    def __init__(self, width: int, feedforward_width: int):
        super().__init__()
        self.gate_proj = Linear(width, feedforward_width, bias=False)
        self.up_proj = Linear(width, feedforward_width, bias=False)
        self.down_proj = Linear(feedforward_width, width, bias=False)

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """The layer's output, to be added to the residual stream."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

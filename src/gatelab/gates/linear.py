"""The linear layer of every projection in the house."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class Linear(nn.Linear):
    """``torch.nn.Linear`` that computes in the dtype of its input, so float32 weights serve a bfloat16 pass."""

    def forward(self, input: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        """``input W^T + b`` with W (O I)."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)
